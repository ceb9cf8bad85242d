"""Reading evaluation sets: files, folders and Hub data sets become the dataclasses of `evaluation.types`."""
