"""Loss functions of embeddings; a loss never holds a model."""
