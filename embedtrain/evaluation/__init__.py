"""Encoding over ranks, exact search over shards, metrics, and the sets they are measured on."""
