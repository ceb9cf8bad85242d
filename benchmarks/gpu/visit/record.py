"""What a visit has found so far: a line of JSON for each entry that begins or ends, and the report made of them."""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DUE, STARTED, DONE, FAILED, SKIPPED = "due", "started", "done", "failed", "skipped"
Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """The file of a visit. It is appended to, so that a killed process loses only the entry that it measures."""

    path: Path

    def add(self, part: str, entry: str, state: str, **more: object) -> None:
        """Append a line, and wait until it is on the disk."""
        row = {"part": part, "entry": entry, "state": state, "time": time.strftime("%Y-%m-%d %H:%M:%S"), **more}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def announce(self, part: str, entries: Iterable[str]) -> None:
        """Append the names of entries that a process is about to measure."""
        with self.path.open("a") as file:
            file.writelines(json.dumps({"part": part, "entry": entry, "state": DUE}) + "\n" for entry in entries)

    def last(self, part: str | None = None) -> dict[tuple[str, str], Row]:
        """The last line of each entry, of one part or of all; in the order in which entries were first begun."""
        if not self.path.is_file():
            return {}
        rows: dict[tuple[str, str], Row] = {}
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # written while the process was killed
                continue
            rows[row["part"], row["entry"]] = row
        return {key: row for key, row in rows.items() if part in (None, key[0])}

    def running(self, part: str) -> Row | None:
        """The entry of the part that has begun and not ended."""
        return next((row for row in self.last(part).values() if row["state"] == STARTED), None)


def report(record: Record, titles: Mapping[str, str]) -> str:
    """A page in Markdown: a section for each part, with a table for entries with the same columns."""
    sections = ["# A visit to a GPU"]
    for part, title in titles.items():
        rows = list(record.last(part).values())
        if rows:
            sections += [f"## {title} ({part})", *_tables(rows), *_problems(rows)]
    return "\n\n".join(sections) + "\n"


def _tables(rows: Iterable[Row]) -> Iterable[str]:
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["state"] == DONE:
            tables.setdefault(tuple(row["values"]), []).append(row)
    for columns, group in tables.items():
        lines = [["", *columns, "s"], ["---"] * (len(columns) + 2)]
        lines += [[row["entry"], *map(_cell, row["values"].values()), f"{row['seconds']:.1f}"] for row in group]
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def _problems(rows: Iterable[Row]) -> Iterable[str]:
    lines = [
        f"- {row['entry']}: **{row['state']}**, {' '.join(str(row['message']).split())}"
        for row in rows
        if row["state"] in (FAILED, SKIPPED)
    ]
    waiting = [row["entry"] for row in rows if row["state"] in (DUE, STARTED)]
    if waiting:
        lines.append(f"- not reached: {'; '.join(waiting)}")
    if lines:
        yield "\n".join(lines)
