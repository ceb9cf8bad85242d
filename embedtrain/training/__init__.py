"""The loop, the step, gradient caching, optimiser, schedule, state."""
