"""Tests of the command submit."""
