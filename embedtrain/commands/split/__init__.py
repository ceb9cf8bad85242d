"""`python -m embedtrain split`: hold out queries of training rows as an evaluation set."""
