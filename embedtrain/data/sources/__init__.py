"""Readers of training data: local files, folders, URLs and Hub data sets as checked rows."""
