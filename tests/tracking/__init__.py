"""Tests of what a run tells and records."""
