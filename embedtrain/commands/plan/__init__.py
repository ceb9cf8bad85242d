"""`python -m embedtrain plan`: memory, strategy and time of a training run before it starts."""
