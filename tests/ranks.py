"""Real ranks for tests: worker processes over gloo or NCCL that stay alive, since importing torch costs seconds
and the first steps of a process are slow.

    results = ranks(3, check_something, argument)      # one result per rank, in rank order

A checked function is a module-level function; it runs on every rank inside a process group of its own and
gets a `World` as its first argument. What it raises is raised in the test with the rank's traceback.
Workers of a pool may have another device, which is installed before they import torch: see tests/pretend_cuda.
"""

import gc
import itertools
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.forked import fork_context

GROUPS_ALIVE = 10  # process groups of earlier calls that a worker keeps; freeing them takes a fraction of a second
# torch 2.11 does not free them (2.13 does), so that workers with it are replaced after this many calls.
MAX_CALLS = 30 if Version(metadata.version("torch")) < Version("2.13") else None


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


class RankPool:
    """Worker processes, started when first needed and used again by every later test.

    Args:
        open_device: returns the device of every rank, over gloo; default: the CPU.
        nccl: whether each rank has a GPU of its own, over NCCL. Otherwise ranks see no GPU.
    """

    def __init__(self, open_device: Callable[[], Any] | None = None, *, nccl: bool = False) -> None:
        self._open_device, self._nccl = open_device, nccl
        self._context = mp.get_context("spawn") if nccl or open_device else fork_context()
        self._workers: list[tuple[Any, Connection]] = []
        self._num_calls = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
        """`function(world, *args)` on `world_size` ranks; their results in rank order."""
        answers = self._call(world_size, function, args, timeout)
        if any(ok is None for ok, _ in answers):  # gloo may fail to connect on a busy machine
            answers = self._call(world_size, function, args, timeout)
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            if self._nccl:  # after some errors a process can no longer use its GPU
                self.stop()
            raise RankFailed("\n".join(failures))
        return [value for _, value in answers]

    def _call(
        self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[tuple[bool | None, Any]]:
        self._num_calls += 1
        if MAX_CALLS and self._num_calls % MAX_CALLS == 0:
            self.stop()
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                self._workers[rank][1].send((function, args, rank, world_size, str(Path(folder) / "store")))
            return self._collect(world_size, timeout)

    def _start(self, world_size: int) -> None:
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._open_device, self._nccl), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def _collect(self, world_size: int, timeout: float) -> list[tuple[bool | None, Any]]:
        answers: list[tuple[bool | None, Any]] = [(False, "no answer")] * world_size
        deadline = time.monotonic() + timeout
        waiting = set(range(world_size))
        broken = False
        while waiting and not broken:
            for rank in sorted(waiting):
                process, pipe = self._workers[rank]
                try:
                    if pipe.poll(0.005):
                        answers[rank] = pipe.recv()
                        waiting.discard(rank)
                        broken = broken or answers[rank][0] is None
                    elif not process.is_alive():
                        answers[rank], broken = (False, f"the process died with exit code {process.exitcode}"), True
                except EOFError:
                    answers[rank], broken = (False, f"the process died with exit code {process.exitcode}"), True
            if time.monotonic() > deadline:
                broken = True
        if broken:
            self.stop()
        return answers

    def stop(self) -> None:
        """End all workers; the next `run` starts fresh ones."""
        for process, _ in self._workers:
            process.kill()
        self._workers = []


def _serve(pipe: Connection, open_device: Callable[[], Any] | None, nccl: bool) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", GLOO_SOCKET_IFNAME="lo")
    if not nccl:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = None if open_device is None else open_device()
    import torch
    import torch.distributed as dist

    from embedtrain.cli.in_process import free_process_groups
    from embedtrain.distributed.world import World, init_process_group

    torch.set_num_threads(1)
    gc.freeze()  # objects of libraries, which each collection would visit; forked workers have them frozen already
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    for number in itertools.count(1):
        try:
            function, args, rank, world_size, store = pipe.recv()
        except EOFError:
            return
        try:
            if nccl:
                device = torch.device("cuda", rank)
                torch.cuda.set_device(device)
            place = device or torch.device("cpu")
            # As a run does: a group with NCCL is bound to its device.
            init_process_group(dist.FileStore(store, world_size), rank, world_size, place, backend, timeout=60.0)
        except Exception:  # the pool starts fresh workers
            pipe.send((None, traceback.format_exc()))
            continue
        world = World(rank, world_size, rank, world_size, place)
        try:
            answer = (True, function(world, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            dist.destroy_process_group()
        except Exception:
            answer = (False, f"{answer[1]}\nand the process group could not be ended:\n{traceback.format_exc()}")
        pipe.send(answer)
        if number % GROUPS_ALIVE == 0:
            # The threads of each group wake up a hundred times a second: a hundred groups took a third of the CPU.
            free_process_groups()
