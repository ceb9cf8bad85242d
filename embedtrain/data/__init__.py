"""Training data: from files to chunks of tokens."""
