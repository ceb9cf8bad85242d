"""Tests of the images."""
