"""Directories that earlier stages of a pipeline will write: paths in them may be missing when options are composed."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

_DIRECTORIES: ContextVar[tuple[Path, ...] | None] = ContextVar("expected_directories", default=None)


@contextlib.contextmanager
def expected_directories(directories: Sequence[Path]) -> Iterator[None]:
    """Within the block, options of a stage are composed, and paths below these directories count as present."""
    token = _DIRECTORIES.set(tuple(Path(os.path.abspath(directory)) for directory in directories))
    try:
        yield
    finally:
        _DIRECTORIES.reset(token)


def composes_stage() -> bool:
    """Whether options of a stage of a pipeline are composed, whose ranks run commands of a single process as well."""
    return _DIRECTORIES.get() is not None


def is_expected(path: str) -> bool:
    """Whether an earlier stage will write this path."""
    absolute = Path(os.path.abspath(os.path.expanduser(path)))
    return any(absolute.is_relative_to(directory) for directory in _DIRECTORIES.get() or ())
