"""`embedtrain verify`: compare what libraries and serving engines compute with the output of the model."""
