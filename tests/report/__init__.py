"""Tests of the command report."""
