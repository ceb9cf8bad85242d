"""Tests of what a run reports and records."""
