"""MTEB tasks, run by rank 0 and encoded by all ranks."""
