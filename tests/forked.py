"""Processes that are forked from one which has imported everything: they start within a second instead of eight."""

import multiprocessing as mp
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path


def fork_context() -> ForkServerContext:
    """For processes on the CPU. A process that uses CUDA, or imports torch in its own way, needs `spawn`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def run_module(
    arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path, stdin: str, timeout: float = 240.0
) -> tuple[int | None, str, str]:
    """Exit code (None after `timeout` seconds), standard output and standard error of `python -m ARGUMENTS`."""
    with tempfile.TemporaryDirectory() as directory:
        streams = [Path(directory, name) for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin)
        process = fork_context().Process(target=_run_module, args=(arguments, dict(environment), folder, streams))
        process.start()
        process.join(timeout)
        process.kill()
        return process.exitcode, streams[1].read_text(), streams[2].read_text()


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
