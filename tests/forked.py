"""Processes that are forked from one which has imported everything: they start within a second instead of eight."""

import multiprocessing as mp
import multiprocessing.connection
import os
import runpy
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path


def fork_context() -> ForkServerContext:
    """For processes on the CPU. A process that uses CUDA, or imports torch in its own way, needs `spawn`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def torchrun_environment(rank: int, size: int, port: int, *, agent: bool = True) -> dict[str, str]:
    """What torchrun sets for a rank on this host; `agent`: whether the store at `port` is not hosted by rank 0."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(agent),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


def run_module(
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    folder: Path,
    stdin: str,
    ranks: int = 0,
    timeout: float = 240.0,
) -> tuple[int | None, str, str]:
    """Exit code (None after `timeout` seconds), standard output and standard error of `python -m ARGUMENTS`.

    With `ranks` it runs as many times, as under torchrun, which ends the other ranks when one has failed.
    """
    from torch.distributed import TCPStore  # which ranks with a pretended device import after it is installed

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if ranks else None
    more = [torchrun_environment(rank, ranks, store.port) for rank in range(ranks)] if store else [{}]
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as directory:
        streams = [Path(directory, name) for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin)
        processes = [
            fork_context().Process(target=_run_module, args=(arguments, {**environment, **own}, folder, streams))
            for own in more
        ]
        for process in processes:
            process.start()
        while (running := [one for one in processes if one.is_alive()]) and time.monotonic() < deadline:
            mp.connection.wait([one.sentinel for one in running], deadline - time.monotonic())
            if any(one.exitcode for one in processes):
                for one in running:
                    one.terminate()
        for process in running:
            process.kill()
        codes = [one.exitcode for one in processes]
        code = None if None in codes else 1 if ranks and any(codes) else codes[0]
        return code, streams[1].read_text(), streams[2].read_text()


def _run_module(arguments: tuple[str, ...], environment: dict[str, str], folder: Path, streams: list[Path]) -> None:
    for descriptor, path in enumerate(streams):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY
        os.dup2(os.open(path, flags), descriptor)
    sys.stdin = os.fdopen(0)  # multiprocessing has replaced it by an empty one
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = list(arguments)
    # This process, unlike that of `python -m`, has imported the modules before.
    warnings.filterwarnings("ignore", category=RuntimeWarning, message=".*found in sys.modules")
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
