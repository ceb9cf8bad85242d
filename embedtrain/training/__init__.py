"""Run set-up, training loop, step, backward pass, optimizer, resume rules."""
