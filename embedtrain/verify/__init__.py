"""`embedtrain verify`: compare the vectors that libraries and serving engines compute with those of the encoder."""
