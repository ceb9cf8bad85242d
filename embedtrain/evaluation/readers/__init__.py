"""Readers of evaluation sets: files, folders and Hub data sets as the types of `evaluation.types`."""
