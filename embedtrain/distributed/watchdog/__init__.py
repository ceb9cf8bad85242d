"""Detection of lost and hanging ranks, independent of collectives."""
