"""Console, metrics.jsonl, Weights & Biases and TensorBoard."""
