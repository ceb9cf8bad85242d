"""Tests of embedtrain.distributed."""
