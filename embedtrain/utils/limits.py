"""Limits that a shell or a service manager sets on this process (`ulimit`): named at the start and in errors."""

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from embedtrain.errors import EmbedtrainError
from embedtrain.utils.formatting import format_bytes

_OPEN_FILES = 4096  # requested; more than any run needs with hundreds of files and ranks


def num_usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of this process."""

    option: str  # of ulimit
    number: int  # of `resource`
    name: str
    usual: int  # a lower one is reported at the start
    errors: re.Pattern[str]  # what Python, torch and the dynamic loader raise when it is reached
    is_size: bool = True

    @property
    def value(self) -> int | None:
        """The limit in bytes, or files or threads; None if there is none."""
        soft, _ = resource.getrlimit(self.number)
        return None if soft == resource.RLIM_INFINITY else soft

    def __str__(self) -> str:
        value = self.value
        return f"{self.name} {format_bytes(value) if value is not None and self.is_size else value} ({self.option})"


_MEMORY = re.compile(r"[Cc]annot allocate memory|can't allocate memory|MemoryError|bad_alloc|failed to map segment")
_THREADS = re.compile(r"can't start new thread|Resource temporarily unavailable")
_LIMITS = (
    Limit("ulimit -n", resource.RLIMIT_NOFILE, "open files", 256, re.compile("Too many open files"), is_size=False),
    Limit("ulimit -f", resource.RLIMIT_FSIZE, "size of a file", 1 << 40, re.compile("File too large")),
    Limit("ulimit -u", resource.RLIMIT_NPROC, "threads of the user", 1024, _THREADS, is_size=False),
    Limit(
        "ulimit -v", resource.RLIMIT_AS, "address space", 1 << 40, re.compile(f"{_MEMORY.pattern}|{_THREADS.pattern}")
    ),
)


def raise_open_files() -> None:
    """Raise the limit of open files as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def report_low_limits() -> None:
    """Print the limits that are lower than usual, once per host.

    A library in C++ or Rust that reaches one ends the process with a message that does not name it, or with none.
    """
    low = [str(limit) for limit in _LIMITS if limit.value is not None and limit.value < limit.usual]
    if low and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"low limits of this process, which may end or block it: {', '.join(low)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def explain_limits() -> Iterator[None]:
    """Add the limit that was reached to an error of the block; other errors become an EmbedtrainError."""
    try:
        yield
    except Exception as error:
        limits = [str(limit) for limit in _LIMITS if limit.value is not None and limit.errors.search(_describe(error))]
        if not limits or "ulimit" in str(error):
            raise
        reason = f"a limit of this process was reached: {' or '.join(limits)}; raise it and run the same command again"
        if isinstance(error, EmbedtrainError):
            error.args = (f"{error}; {reason}", *error.args[1:])
            raise
        message = f"{type(error).__name__}: {error}".rstrip(": ")
        raise EmbedtrainError(f"{message}; {reason}") from error


def _describe(error: BaseException) -> str:
    """The types and messages of an error and its causes."""
    texts: list[str] = []
    chain: BaseException | None = error
    while chain is not None and len(texts) < 20:
        texts.append(f"{type(chain).__name__}: {chain}")
        chain = chain.__cause__ or chain.__context__
    return "\n".join(texts)
