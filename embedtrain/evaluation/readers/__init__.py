"""Readers of evaluation sets: files and Hub repositories to typed sets."""
