"""Tests of embedtrain.config."""
