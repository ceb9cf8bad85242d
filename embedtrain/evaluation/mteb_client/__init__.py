"""MTEB as a client: `mteb` runs its tasks on rank 0, and every text is encoded and searched over all ranks."""
