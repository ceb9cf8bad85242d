"""`python -m embedtrain merge`: one model of the weights of several."""
