"""Save, load and retain checkpoints; the run directory."""
