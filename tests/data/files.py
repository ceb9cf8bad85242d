"""Writes files of training rows, and reads them as a source."""

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.row_checks import SourceReport
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.rows import Example
from embedtrain.errors import DataError, EmbedtrainError

NO_NEEDS = RowRequirements()


def line(row: object) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def write(path: Path, *rows: object) -> Path:
    """A JSONL file; bytes are written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(row if isinstance(row, bytes) else line(row) for row in rows)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(
    path: object, on_error: OnError = OnError.stop, *, needs: RowRequirements = NO_NEEDS, **options: Any
) -> tuple[list[Example], SourceReport]:
    """The rows of one source, and its report."""
    (store,) = read_sources([TrainSource(path=str(path), **options)], on_error, needs)
    return list(store), store.report


def error_of(path: object, expected: type[EmbedtrainError] = DataError, **options: Any) -> str:
    """The message of the error that reading a source raises."""
    with pytest.raises(expected) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_error(pattern: str, path: object, expected: type[EmbedtrainError] = DataError, **options: Any) -> None:
    """Reading a source raises an error that matches a pattern: location, option and value."""
    message = error_of(path, expected, **options)
    assert re.search(pattern, message), message


def write_table(path: Path, table: dict[str, list[Any]]) -> Path:
    """A file of columns; the suffix gives its kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    match "".join(path.suffixes):
        case ".parquet":
            pq.write_table(pa.table(table), path)
        case ".arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pa.table(table).schema) as writer:
                writer.write_table(pa.table(table))
        case ".jsonl" | ".jsonl.gz":
            write(path, *rows)
        case suffixes:
            opener = gzip.open if suffixes.endswith(".gz") else open
            with opener(path, "wt", encoding="utf-8-sig", newline="") as file:
                writer = csv.DictWriter(file, list(table), delimiter="\t" if ".tsv" in suffixes else ",")
                writer.writeheader()
                writer.writerows(rows)
    return path
