"""sessions.jsonl: when a run was in progress, on how many ranks, and how each session ended."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.utils.files import atomic_write, open_append
from embedtrain.utils.formatting import mask_passwords
from embedtrain.utils.records import read_record

SESSIONS_FILE = "sessions.jsonl"
# Only the beginning of an error is stored: the terminal shows all of it.
_ERROR_LENGTH = 500
_MAX_TIME = 253_402_300_800  # seconds from the epoch to the year 10000


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """How a session ended; nothing is known of one that is still in progress, or was killed."""

    ended: float | None = None  # seconds since the epoch
    how: str | None = None  # `finished`, `stopped` or `failed`
    last_step: int | None = None  # steps done
    error: str | None = None
    exported: int | None = None  # the step whose weights were exported
    check: str | None = None  # how the comparison of the export has ended


@dataclass(frozen=True, slots=True)
class Session:
    """One period in which the run was in progress."""

    started: float  # seconds since the epoch
    step: int  # steps done before
    total_steps: int  # the last step that it was to reach
    ranks: int
    devices: str  # such as `cpu` or `NVIDIA H100`
    steps_per_epoch: float | None = None
    end: SessionEnd = SessionEnd()


class SessionClock:
    """The time of a session: that of day at its start, and what has elapsed since on a clock that nobody sets."""

    def __init__(self) -> None:
        self.started = time.time()
        self._monotonic = time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch, never before the start."""
        return self.started + time.monotonic() - self._monotonic


def record_start(
    path: Path,
    clock: SessionClock,
    *,
    step: int,
    total_steps: int,
    ranks: int,
    devices: str,
    from_scratch: bool,
    steps_per_epoch: float | None = None,
) -> None:
    """Append the start of a session; `from_scratch`: replace the file, whose sessions are of another run."""
    row = {"started": clock.started, "step": step, "total_steps": total_steps, "ranks": ranks, "devices": devices}
    row["steps_per_epoch"] = steps_per_epoch
    if from_scratch:
        with atomic_write(path) as temporary:
            temporary.touch()
    _append(path, row)


def record_end(
    path: Path,
    clock: SessionClock,
    how: str,
    *,
    step: int,
    error: str | None = None,
    exported: int | None = None,
    check: str | None = None,
) -> None:
    """Append the end of a session."""
    row = {"ended": clock.now(), "how": how, "last_step": step, "exported": exported}
    if check is not None:
        row["check"] = check
    if error is not None:
        row["error"] = mask_passwords(error)[:_ERROR_LENGTH]
    _append(path, row)


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with open_append(path) as file:
        file.write((json.dumps(row) + "\n").encode())


def read_sessions(path: Path) -> list[Session]:
    """All sessions in order; invalid lines are skipped, as a killed process may leave an incomplete one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    sessions: list[Session] = []
    start: dict[str, Any] | None = None  # of the last session, if it has no end yet
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if not isinstance(row, dict):
                continue
            if "started" in row:
                start = None
                sessions.append(_session(row))
                start = row
            elif start is not None:
                sessions[-1] = _session(start | row)
                start = None
    return sessions


def _session(row: Mapping[str, Any]) -> Session:
    """The session of a row of its start, or of the entries of both its rows; ValueError if it is invalid."""
    session = read_record(Session, {**row, "end": row})
    if not all(0 <= (seconds or 0) <= _MAX_TIME for seconds in (session.started, session.end.ended)):
        raise ValueError("its time is not on the calendar")
    return session


def total_seconds(sessions: Sequence[Session], last_written: float | None) -> float | None:
    """How long a run was in progress over all sessions, in seconds.

    A session without a recorded end counts until `last_written`, when a metric was last written.
    """
    if not sessions:
        return None
    total = 0.0
    for number, session in enumerate(sessions):
        end = session.end.ended
        if end is None:
            next_start = sessions[number + 1].started if number + 1 < len(sessions) else float("inf")
            end = min(next_start, last_written if last_written is not None else session.started)
        total += max(0.0, end - session.started)
    return total
