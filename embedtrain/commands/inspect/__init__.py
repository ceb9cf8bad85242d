"""`python -m embedtrain inspect`: what training data contains."""
