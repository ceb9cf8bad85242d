"""Detect ranks that are lost or hang."""
