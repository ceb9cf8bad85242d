"""Side-by-side measurements: `make bench` runs all tables, `python -m benchmarks training encoding` runs two."""
