"""`python -m embedtrain filter`: keep the training rows whose positives a model ranks high."""
