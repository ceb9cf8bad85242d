"""Tests of the command doctor."""
