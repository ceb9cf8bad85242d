"""Measurements on a GPU, table by table: `python -m benchmarks.gpu`."""
