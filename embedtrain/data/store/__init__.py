"""Rows and tokens on disk: built once by all processes side by side, then memory-mapped."""
