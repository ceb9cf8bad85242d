"""Tests of what the doctor finds."""
