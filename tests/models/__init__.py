"""Tests of embedtrain.models."""
