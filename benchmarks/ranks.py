"""Ranks in processes of their own: gloo, or NCCL if there is a GPU for each rank."""

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
from embedtrain.inference.loading.load import quiet_libraries

T = TypeVar("T")


def on_ranks(size: int, function: Callable[[int, Path], T], *, preload: str = "") -> list[T]:
    """Run `function(rank, folder)` in `size` processes with a common `folder`; return the results in rank order.

    Without a GPU, processes are forked from one that has imported the module `preload` and computed nothing.
    """
    forks = preload and not torch.cuda.is_available()  # CUDA cannot be forked
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([preload])
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, mp_context=context, initializer=_start) as pool,
    ):
        # Each call waits in its first collective until all calls run, so each runs in its own process.
        calls = [pool.submit(function, rank, Path(folder)) for rank in range(size)]
        return [call.result() for call in calls]


@contextlib.contextmanager
def world_of(size: int, rank: int, store: Path, min_gpus: int) -> Iterator[World]:
    """A process group of `size` ranks; on GPUs if there are `min_gpus`, so all sizes of a table use one device type."""
    cuda = torch.cuda.device_count() >= min_gpus
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
