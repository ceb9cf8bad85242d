"""The command `embedtrain static`: a static embedding model from a model."""
