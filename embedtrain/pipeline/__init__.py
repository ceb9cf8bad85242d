"""Pipelines: several commands as stages of one recipe, with one command, one lock and one state."""
