"""Memory, traffic and FLOPs of a training step; the choice of a parallel strategy."""
