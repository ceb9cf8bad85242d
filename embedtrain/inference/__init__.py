"""Encode texts on all ranks, search exactly over sharded documents, cache vectors on disk."""
