"""Backbone, pooling, heads, packing, attention, adapters and the security checks of model directories."""
