"""One module per kind of evaluation task."""
