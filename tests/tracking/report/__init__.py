"""The report: read back as HTML, computed anew, and looked at in a real browser."""
