"""The report: parsed as HTML, recomputed, and opened in a real browser."""
