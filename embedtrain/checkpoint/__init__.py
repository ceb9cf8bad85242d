"""Saving, loading and keeping checkpoints; model directories that other libraries open."""
