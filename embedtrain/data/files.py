"""Rows as files hold them, unchecked: JSONL, CSV, TSV, Parquet and what `datasets` opens -> (line, row or problem)."""

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from embedtrain.data.sources import Kind, Part, saved_to_disk
from embedtrain.errors import DataError

ROWS_AT_ONCE = 1024


class BadRow(Exception):
    """One row that cannot be used; the text says why, without saying where."""


RawRow: TypeAlias = tuple[int, dict[str, Any] | BadRow]


def raw_rows(part: Part, *, subset: str | None, split: str, columns: list[str] | None) -> Iterator[RawRow]:
    """Every row of a part: its line or row number counted from 1, and its values by column or key.

    Args:
        part: the file or Hub data set.
        subset: configuration of a Hub data set.
        split: split of a Hub data set.
        columns: the columns wanted; others need not be read. None: all.

    Raises:
        DataError: the file as a whole cannot be read: missing, damaged, cut short, without a header.
    """
    match part.kind:
        case Kind.jsonl:
            return json_rows(Path(part.name))
        case Kind.csv:
            return table_rows(Path(part.name), csv.excel)
        case Kind.tsv:
            return table_rows(Path(part.name), PlainTsv)
        case Kind.parquet:
            return parquet_rows(Path(part.name), columns)
        case Kind.hub:
            return hub_rows(part.name, subset, split, columns)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    r"""The lines of a plain or gzip file with their numbers from 1, cut at `\n`, a byte order mark left out.

    Raises:
        DataError: the file is missing, unreadable, no gzip although named so, damaged, cut short, or UTF-16.
    """
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise DataError(f"{path}: this file is UTF-16: save it as UTF-8")
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}:{number + 1}: the gzip file is damaged or cut short ({error}): copy or download it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    with path.open("rb") as file:
        start = file.read(2)
    if start == b"\x1f\x8b":  # what the file is counts, not what it is called
        return gzip.open(path, "rb")
    if path.name.lower().endswith(".gz") and start:
        raise DataError(f"{path}: is named .gz but is no gzip file: rename it, or copy it again")
    return path.open("rb")


def json_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a JSONL file, one JSON object a line. Blank lines are passed over, but counted."""
    for number, line in lines_of(path):
        if line.strip():
            yield number, _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(not_utf8(line, error.start))
    except json.JSONDecodeError as error:
        return BadRow(f"broken JSON: {error.msg} at column {error.colno}: {shortened(error.doc)}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        return BadRow(f"JSON that cannot be read ({error})")
    if isinstance(row, dict):
        return row
    hint = ": write one object a line, not one array a file" if isinstance(row, list) else ""
    return BadRow(f"a row must be a JSON object {{...}}, not {told(row)}{hint}")


class PlainTsv(csv.excel_tab):
    """Tab-separated values as data sets publish them: a quotation mark is a character like any other."""

    quoting = csv.QUOTE_NONE


def table_rows(path: Path, dialect: type[csv.Dialect]) -> Iterator[RawRow]:
    """The rows of a CSV or TSV file with a header. An empty cell is None; a row's number is its first line's.

    Raises:
        DataError: no header, or a header with a name that is empty or given twice.
    """
    # The default limit of 128 KiB a cell is less than a long document. It is the process's, and harmless.
    csv.field_size_limit(sys.maxsize)
    wrong_bytes: dict[int, str] = {}
    reader = csv.reader(_decoded(path, wrong_bytes), dialect, strict=True)
    header: list[str] | None = None
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield first, BadRow(f"broken CSV: {error}")
            continue
        problem = wrong_bytes.pop(reader.line_num, None) or next(iter(wrong_bytes.values()), None)
        wrong_bytes.clear()
        if not cells:
            continue
        if header is None:
            header = _header(path, cells, problem)
        elif problem:
            yield first, BadRow(problem)
        elif len(cells) != len(header):
            yield first, BadRow(f"{len(cells)} cells where the header has {len(header)}: {shortened(cells)}")
        else:
            yield first, {name: cell or None for name, cell in zip(header, cells, strict=True)}


def _decoded(path: Path, wrong_bytes: dict[int, str]) -> Iterator[str]:
    """Lines as text; what is wrong with a line's bytes is put in `wrong_bytes` under its number."""
    for number, line in lines_of(path):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            wrong_bytes[number] = not_utf8(line, error.start)
            yield line.decode("utf-8", "replace")


def _header(path: Path, cells: list[str], problem: str | None) -> list[str]:
    if problem:
        raise DataError(f"{path}:1: {problem}")
    if len(set(cells)) < len(cells):
        raise DataError(f"{path}:1: the header names a column twice: {shortened(cells)}")
    if "" in cells:
        raise DataError(
            f"{path}:1: column {cells.index('') + 1} of the header has no name: "
            "leave the column out (pandas: to_csv(..., index=False)) or give it a name"
        )
    return cells


def parquet_rows(path: Path, columns: list[str] | None) -> Iterator[RawRow]:
    """The rows of a Parquet file."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            wanted = _wanted(str(path), file.schema_arrow.names, columns)
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
                for row in _python_rows(batch):
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def hub_rows(name: str, subset: str | None, split: str, columns: list[str] | None) -> Iterator[RawRow]:
    """The rows of one split of a data set of the Hub, or of a folder that `datasets` can open."""
    import datasets  # takes a second, and most sources are plain files

    try:
        if saved_to_disk(Path(name)):
            data = datasets.load_from_disk(name)
            data = data[split] if isinstance(data, datasets.DatasetDict) else data
        else:
            data = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # anything: network, name, split, the data set's own files
        what = " ".join(str(error).split())
        raise DataError(
            f"{name}: neither a file here nor a data set that can be opened "
            f"(subset {subset}, split {split}): {type(error).__name__}: {what}"
        ) from error
    data = data.select_columns(_wanted(name, data.column_names, columns)).with_format("arrow")
    number = 0
    for table in data.iter(batch_size=ROWS_AT_ONCE):
        for batch in table.to_batches():
            for row in _python_rows(batch):
                number += 1
                yield number, row


def _wanted(name: str, present: list[str], columns: list[str] | None) -> list[str]:
    if columns is None:
        return [column for column in present if not column.startswith("__index_level_")]  # a pandas index
    missing = [column for column in columns if column not in present]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r}; there are: {', '.join(present)}")
    return columns


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any] | BadRow]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:  # rare, so only now row by row
        return [_python_row(batch.slice(i, 1)) for i in range(batch.num_rows)]


def _python_row(batch: pa.RecordBatch) -> dict[str, Any] | BadRow:
    try:
        return dict(batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        return BadRow(not_utf8(error.object, error.start))


def not_utf8(data: bytes, position: int) -> str:
    """The sentence about bytes that are no UTF-8, with some text around them."""
    around = data[max(0, position - 20) : position + 20].decode("utf-8", "backslashreplace").strip()
    return f"not UTF-8 (byte 0x{data[position]:02x} in {shortened(around)}): save the file as UTF-8"


def shortened(value: object, length: int = 60) -> str:
    """A value as messages show it: on one line, not longer than `length` and three dots."""
    text = repr(value if not isinstance(value, str) else value[: length + 1])
    return text if len(text) <= length + 2 else text[:length] + "..."


def told(value: object) -> str:
    """What a value is, in a user's words, and the value itself, shortened."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"a truth value ({value})"
        case int() | float():
            return f"a number ({shortened(value)})"
        case str():
            return f"a text ({shortened(value)})"
        case list():
            return f"a list ({shortened(value)})"
        case dict():
            return f"an object ({shortened(value)})"
        case bytes():
            return f"binary data ({shortened(value)})"
        case _:
            return f"{type(value).__name__} ({shortened(value)})"
