"""Backbone, pooling, heads, tokenizer, adapters and the security checks of model directories."""
