"""Tests of embedtrain.training."""
