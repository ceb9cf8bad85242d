"""`python -m embedtrain mine`: hard negatives for training rows."""
