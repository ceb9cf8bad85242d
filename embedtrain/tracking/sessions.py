"""sessions.jsonl: when a run was in progress, on how many ranks, and how each session ended."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.files import atomic_write, open_append

SESSIONS_FILE = "sessions.jsonl"
# Only the beginning of an error is stored: the terminal shows all of it.
_ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Session:
    """One period in which the run was in progress."""

    started: float  # seconds since the epoch
    step: int  # steps done before
    total_steps: int  # the last step that it was to reach
    ranks: int
    devices: str  # such as `cpu` or `NVIDIA H100`
    ended: float | None = None  # seconds since the epoch; None: still in progress, or killed
    how: str | None = None  # `finished`, `stopped` or `failed`; None: still in progress, or killed
    last_step: int | None = None  # steps done at its end
    error: str | None = None
    exported: int | None = None  # the step whose weights were exported


def record_start(path: Path, *, step: int, total_steps: int, ranks: int, devices: str, from_scratch: bool) -> None:
    """Append the start of a session; `from_scratch`: replace the file, whose sessions are of another run."""
    row = {"started": time.time(), "step": step, "total_steps": total_steps, "ranks": ranks, "devices": devices}
    if from_scratch:
        with atomic_write(path) as temporary:
            temporary.touch()
    _append(path, row)


def record_end(path: Path, how: str, *, step: int, error: str | None = None, exported: int | None = None) -> None:
    """Append the end of a session."""
    row = {"ended": time.time(), "how": how, "last_step": step, "exported": exported}
    if error is not None:
        row["error"] = error[:_ERROR_LENGTH]
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
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        if "started" in row:
            rows.append(row)
        elif rows and "ended" not in rows[-1]:
            rows[-1] |= row
    return [session for session in map(_session, rows) if session is not None]


def _session(row: Mapping[str, Any]) -> Session | None:
    def number(name: str) -> float | None:
        value = row.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def integer(name: str) -> int | None:
        value = number(name)
        return None if value is None else int(value)

    def text(name: str) -> str | None:
        value = row.get(name)
        return value if isinstance(value, str) else None

    started = number("started")
    if started is None:
        return None
    return Session(
        started,
        integer("step") or 0,
        integer("total_steps") or 0,
        integer("ranks") or 1,
        text("devices") or "",
        number("ended"),
        text("how"),
        integer("last_step"),
        text("error"),
        integer("exported"),
    )


def total_seconds(sessions: Sequence[Session], last_written: float | None) -> float | None:
    """How long a run was in progress over all sessions, in seconds.

    A session without a recorded end counts until `last_written`, when a metric was last written.
    """
    if not sessions:
        return None
    total = 0.0
    for number, session in enumerate(sessions):
        end = session.ended
        if end is None:
            next_start = sessions[number + 1].started if number + 1 < len(sessions) else float("inf")
            end = min(next_start, last_written if last_written is not None else session.started)
        total += max(0.0, end - session.started)
    return total
