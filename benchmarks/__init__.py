"""Side-by-side measurements: `make bench`, or `python -m benchmarks training encoding` for some of them."""
