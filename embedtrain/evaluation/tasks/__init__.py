"""The kinds of evaluation, one file each: which metrics, and how they are measured over all ranks."""
