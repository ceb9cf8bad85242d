"""From sources to examples to global batches to this rank's token chunks."""
