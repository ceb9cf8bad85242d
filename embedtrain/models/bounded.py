"""Runs what the files of a model decide in a process that is ended when it needs too much time or memory."""

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil

from embedtrain.utils.formatting import format_bytes

_MEMORY = 1 << 30  # bytes in addition to those of this process


class BoundExceeded(Exception):
    """The process was ended; the message is what it needed, the end of a sentence."""


def run_bounded(function: Callable[[], Any], seconds: float) -> Any:
    """The result of a function, a JSON value, from a copy of this process that is ended after `seconds`.

    The function must use neither a device nor threads, which a copy does not have. Raises BoundExceeded if it needs
    more time, or more than 1 GiB of memory, or raises anything.
    """
    memory = psutil.Process().memory_info().vms + _MEMORY
    reading, writing = os.pipe()
    # A copy needs milliseconds; a new Python that imports transformers would need seconds.
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(function, writing, seconds, memory)
    os.close(writing)
    try:
        content = _read_until(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if content is None:
        raise BoundExceeded(f"needs more than {seconds:g} s")
    if not content:
        raise BoundExceeded("ends the process that it runs in")
    answer = json.loads(content)
    if "error" in answer:
        raise BoundExceeded(answer["error"])
    return answer["result"]


def _answer(function: Callable[[], Any], writing: int, seconds: float, memory: int) -> None:
    """Write the function's result to a pipe and end this process, whatever happens."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # If the parent is killed, nobody else ends this process.
        _lower(resource.RLIMIT_CPU, int(seconds) + 1)
        _lower(resource.RLIMIT_AS, memory)
        _lower(resource.RLIMIT_CORE, 0)
        try:
            answer = {"result": function()}
        except MemoryError:
            answer = {"error": f"needs more than {format_bytes(_MEMORY, binary=True)} of memory"}
        except BaseException as error:
            answer = {"error": f"raises {type(error).__name__}: {str(error)[:200]}"}
        with os.fdopen(writing, "w") as file:
            json.dump(answer, file)
    finally:
        os._exit(0)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    with contextlib.suppress(OSError, ValueError):  # macOS has no limit of the address space
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _read_until(reading: int, deadline: float) -> bytes | None:
    """What is written until the pipe is closed; None if that is after the deadline."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
