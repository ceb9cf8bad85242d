"""Tests of embedtrain.losses."""
