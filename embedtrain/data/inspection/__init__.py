"""What training data holds: lengths, duplicates, problems, rows as a model sees them."""
