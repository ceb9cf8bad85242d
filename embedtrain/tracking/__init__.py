"""What a run tells: the terminal, metrics.jsonl, and wandb or TensorBoard when asked for. Only rank 0 tells it."""
