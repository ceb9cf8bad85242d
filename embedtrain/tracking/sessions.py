"""sessions.jsonl: when a run was under way, on how many ranks, and how each time ended."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SESSIONS_FILE = "sessions.jsonl"
# Of an error only its beginning: the terminal has all of it.
_ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Session:
    """One time that the run was under way.

    Attributes:
        started: seconds since the epoch.
        step: steps done before.
        total_steps: steps it meant to go to.
        ranks: how many.
        devices: what they are, such as `cpu` or `NVIDIA H100`.
        ended: seconds since the epoch; None: it is still going, or was killed.
        how: `finished`, `stopped` or `failed`; None likewise.
        last_step: steps done at its end.
        error: what it failed with.
        exported: the step whose weights were exported.
    """

    started: float
    step: int
    total_steps: int
    ranks: int
    devices: str
    ended: float | None = None
    how: str | None = None
    last_step: int | None = None
    error: str | None = None
    exported: int | None = None


def began(path: Path, *, step: int, total_steps: int, ranks: int, devices: str, anew: bool) -> None:
    """Note that the run is under way.

    Args:
        path: the file.
        step: steps done before.
        total_steps: how many are meant to be done.
        ranks: how many.
        devices: what they are.
        anew: whether training begins from the start: what was noted before is of another run.

    Raises:
        OSError: the file cannot be written.
    """
    row = {"started": time.time(), "step": step, "total_steps": total_steps, "ranks": ranks, "devices": devices}
    with path.open("w" if anew else "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def ended(path: Path, how: str, *, step: int, error: str | None = None, exported: int | None = None) -> None:
    """Note how it ended.

    Raises:
        OSError: the file cannot be written.
    """
    row = {"ended": time.time(), "how": how, "last_step": step, "exported": exported}
    if error is not None:
        row["error"] = error[:_ERROR_LENGTH]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_sessions(path: Path) -> list[Session]:
    """All of them in order; lines that are none are left out, as a process that is killed may leave half of one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        if "started" in row:
            found.append(row)
        elif found and "ended" not in found[-1]:
            found[-1] |= row
    sessions = [_session(row) for row in found]
    return [session for session in sessions if session is not None]


def _session(row: Mapping[str, Any]) -> Session | None:
    def number(name: str) -> float | None:
        value = row.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(name: str) -> int | None:
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
        whole("step") or 0,
        whole("total_steps") or 0,
        whole("ranks") or 1,
        text("devices") or "",
        number("ended"),
        text("how"),
        whole("last_step"),
        text("error"),
        whole("exported"),
    )


def total_seconds(sessions: Sequence[Session], last_seen: float | None) -> float | None:
    """How long a run was under way in all, in seconds.

    Args:
        sessions: all of them.
        last_seen: when a figure was last written: the end of a session that did not say when it ended.
    """
    if not sessions:
        return None
    total = 0.0
    for number, session in enumerate(sessions):
        until = session.ended
        if until is None:
            later = sessions[number + 1].started if number + 1 < len(sessions) else float("inf")
            until = min(later, last_seen if last_seen is not None else session.started)
        total += max(0.0, until - session.started)
    return total
