"""`python -m embedtrain trim`: a smaller vocabulary for a model, without the tokens that a corpus does not use."""
