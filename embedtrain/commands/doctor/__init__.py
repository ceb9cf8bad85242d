"""`python -m embedtrain doctor`: check whether a machine is ready for training."""
