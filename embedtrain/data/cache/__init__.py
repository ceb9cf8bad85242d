"""Rows and tokens on disk, memory-mapped."""
