"""Threads of ranks that share a machine, set before torch is loaded: OpenMP reads its environment at that moment."""

import os
from collections.abc import MutableMapping


def set_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give each of a machine's ranks its part of the cores, and let threads that wait sleep.

    torchrun sets one thread a rank; ranks that srun or others started would each take all cores. Threads that spin at
    a barrier while another rank needs their core make all of them slower (6.8 times, measured with two threads on two
    cores beside another process). What the user has set stays.
    """
    ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 2:  # what is no number is complained of where ranks meet
        return
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // int(ranks))))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
