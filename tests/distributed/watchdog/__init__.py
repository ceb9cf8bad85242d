"""Tests of the watchdog."""
