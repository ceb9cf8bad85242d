"""`python -m embedtrain calibrate`: an affine head and ranges, from vectors of documents, for an existing model."""
