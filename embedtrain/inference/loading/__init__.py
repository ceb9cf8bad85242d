"""From model options to a sharded encoder."""
