"""Real ranks in processes of their own: gloo, or NCCL where there is a GPU for each."""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from embedtrain.distributed.world import World
from embedtrain.loading.load import quiet_libraries

T = TypeVar("T")


def on_ranks(size: int, function: Callable[[int, Path], T]) -> list[T]:
    """`function(rank, folder)` in `size` processes, which meet in `folder`; the results in rank order."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, mp_context=spawn, initializer=_start) as pool,
    ):
        # Each call waits for the others in its first collective, so each has a process to itself.
        calls = [pool.submit(function, rank, Path(folder)) for rank in range(size)]
        return [call.result() for call in calls]


@contextlib.contextmanager
def world_of(size: int, rank: int, store: Path, most: int) -> Iterator[World]:
    """A process group of `size` ranks; on GPUs if there are `most`, so that all sizes of a table run alike."""
    cuda = torch.cuda.device_count() >= most
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    try:
        yield World(rank, size, rank, size, device)
    finally:
        dist.destroy_process_group()


def _start() -> None:
    torch.set_num_threads(1)
    quiet_libraries()
