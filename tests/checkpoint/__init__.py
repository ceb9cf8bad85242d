"""Tests of embedtrain.checkpoint."""
