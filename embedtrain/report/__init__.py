"""Render runs as one self-contained HTML page."""
