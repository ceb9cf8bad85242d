"""metrics.jsonl: one JSON object per line, one clean history even when a run was killed and continued."""

import json
import math
import resource
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from embedtrain.errors import DataError
from embedtrain.files import atomic_write

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """A file of rows that grows by one line at a time; each line is in the file when `append` returns."""

    def __init__(self, path: str | Path) -> None:
        """Open `path` to append to it; a last line that a killed run wrote half is dropped.

        Raises:
            DataError: the file holds a line that is not a JSON object.
            OSError: the file cannot be written.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._rewrite(read_metrics(self.path), only_if_changed=True)
        self._file = self._opened()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row. NaN and infinity, which JSON does not have, become null.

        Raises:
            OSError: the row could not be written whole (the disk is full, ...); none of it stays in the file.
        """
        line = _line(row)
        try:
            written = self._file.write(line)
            if written < len(line):
                raise OSError(f"{self.path} took {written} of {len(line)} bytes: the disk is full")
        except OSError:
            # Half a line in the middle would make the whole file unreadable once the next row follows it.
            self._file.truncate(self._length)
            raise
        self._length += len(line)

    def truncate_after(self, step: int, *, evaluated: bool = True) -> None:
        """Drop the rows of later steps: a run continued from `step` will write them again.

        Rows that carry no step stay. The file is replaced whole or not at all.

        Args:
            step: the last whose rows stay.
            evaluated: whether those of its evaluation stay as well.
        """
        self._file.close()
        rows = [row for row in read_metrics(self.path) if row.get("step") is None or row["step"] <= step]
        self._rewrite([row for row in rows if evaluated or row.get("step") != step or "set" not in row])
        self._file = self._opened()

    def close(self) -> None:
        """Close the file; the object is of no further use."""
        self._file.close()

    def _opened(self) -> FileIO:
        file = FileIO(self.path, "a")  # unbuffered: what is written is in the file
        self._length = file.tell()
        return file

    def _rewrite(self, rows: list[dict[str, Any]], only_if_changed: bool = False) -> None:
        content = b"".join(map(_line, rows))
        if only_if_changed and content == self.path.read_bytes():
            return
        with atomic_write(self.path, durable=True) as file:
            file.write_bytes(content)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a metrics file, in order; a last line that was written half is left out.

    Raises:
        DataError: a line before the last is not a JSON object.
    """
    # Not splitlines(): a text may hold U+2028, which is a line's end to Python but not to JSON.
    lines = Path(path).read_bytes().decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise DataError(f"{path}:{number} is not a JSON object: delete this line, or move the file away")
    return rows


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False) + "\n").encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)  # numpy's and torch's scalars as well
    return number if math.isfinite(number) else None


def peak_memory_gib(device: torch.device) -> float:
    """GiB: what torch allocated at most on a GPU; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB here


def metrics_at(run_dir: Path, step: int) -> dict[str, dict[str, float]]:
    """What was measured at `step`: evaluation set -> metric -> value; empty where nothing was."""
    return {
        str(row["set"]): {key: value for key, value in row.items() if key not in ("step", "set")}
        for row in _evaluations(run_dir)
        if row["step"] == step
    }


def metric_changes(run_dir: Path) -> list[str]:
    """One line per evaluation set that was measured more than once: its main figure then and now."""
    by_set: dict[str, list[dict[str, Any]]] = {}
    for row in _evaluations(run_dir):
        by_set.setdefault(row["set"], []).append(row)
    lines = []
    for name, rows in by_set.items():
        first, last = rows[0], rows[-1]
        metric = "ndcg@10" if "ndcg@10" in last else "spearman"
        if first["step"] != last["step"] and first.get(metric) is not None and last.get(metric) is not None:
            lines.append(
                f"{name}: {metric} {first[metric]:.4f} at step {first['step']}, "
                f"{last[metric]:.4f} at step {last['step']}"
            )
    return lines


def _evaluations(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / METRICS_FILE
    return [row for row in read_metrics(path) if "set" in row] if path.is_file() else []
