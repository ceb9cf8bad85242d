"""Functions of embeddings and of what the batch knows; they never hold a model."""
