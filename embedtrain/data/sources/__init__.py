"""Readers of training data: files, folders and Hub data sets to rows."""
