"""Hard negatives for training rows, found by the same sharded search that evaluation uses."""
