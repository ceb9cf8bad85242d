"""How much memory this rank took at most."""

import resource
import sys

import torch


def peak_memory_gib(device: torch.device) -> float:
    """GiB: what torch allocated at most on a GPU; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB here
