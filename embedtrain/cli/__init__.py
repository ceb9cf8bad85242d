"""Process entry, exit codes, completion."""
