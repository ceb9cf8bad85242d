"""Evaluation sets, tasks and metrics, computed by all ranks together."""
