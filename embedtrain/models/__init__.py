"""Backbone, pooling and encoder: how a text becomes a vector. Knows nothing of ranks."""
