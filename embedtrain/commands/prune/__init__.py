"""`python -m embedtrain prune`: a smaller model from some of a model's layers."""
