"""`python -m embedtrain search`: search a corpus with a model."""
