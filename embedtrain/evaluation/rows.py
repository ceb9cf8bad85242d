"""Rows of JSONL, TSV, CSV and Parquet files, each with the place it came from, and the checks of a field.

A row is `(where, fields)`; `where` is `file:line`, counted from 1, and starts every message about the row.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embedtrain.errors import DataError

Row = tuple[str, Mapping[str, Any]]

TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".tsv", ".csv", ".parquet")


def stem(path: Path) -> str:
    """A file's name without its ending; both parts of `.jsonl.gz` count as the ending."""
    return next((path.name.removesuffix(s) for s in TABLE_SUFFIXES if path.name.endswith(s)), path.stem)


def read_rows(path: Path) -> Iterator[Row]:
    """Every row of a file, by what its name ends in.

    Raises:
        DataError: another ending, or a row that cannot be read as what the file's name claims.
    """
    match next((s for s in TABLE_SUFFIXES if path.name.endswith(s)), None):
        case ".jsonl" | ".jsonl.gz":
            return _jsonl(path)
        case ".tsv":
            return _named(path, tsv_fields(path))
        case ".csv":
            return _named(path, _csv_fields(path))
        case ".parquet":
            return _parquet(path)
        case _:
            raise DataError(f"{path} is no table this reads: its name must end in {', '.join(TABLE_SUFFIXES)}")


def tsv_fields(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The fields of each line, cut at tabs. Quotation marks are text like any other."""
    for where, line in _lines(path):
        yield where, line.split("\t")


def text_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """The text under the first of `names` that is there.

    Raises:
        DataError: none is there, or it holds no text.
    """
    value = _field(fields, names, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: {'/'.join(names)} must be a text, not {value!r}")
    return _encodable(value, where)


def id_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """The id under the first of `names` that is there; whole numbers become text.

    Raises:
        DataError: none is there, or it is neither text nor a whole number.
    """
    value = _field(fields, names, where)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: {'/'.join(names)} must be an id (a text or a whole number), not {value!r}")
    return _encodable(str(value), where)


def number_field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> float:
    """The finite number under the first of `names` that is there, also where it is written as text.

    Raises:
        DataError: none is there, or it is no finite number.
    """
    value = _field(fields, names, where)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: {'/'.join(names)} must be a number, not {value!r}")
    return number


def _field(fields: Mapping[str, Any], names: Iterable[str], where: str) -> Any:
    for name in names:
        if name in fields:
            return fields[name]
    raise DataError(f"{where}: there is no {' or '.join(names)}, only {', '.join(map(str, fields)) or 'nothing'}")


def _encodable(text: str, where: str) -> str:
    # JSON can spell half of a surrogate pair; tokenizers fail on it with a message about their argument types.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair at character {error.start}, which is no text") from None
    return text


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that hold something, with their place."""
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield f"{path}:{number}", text
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number} is not UTF-8: {error}") from None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}:{number + 1}: the gzip file is damaged or cut off: {error}") from None


def _jsonl(path: Path) -> Iterator[Row]:
    for where, line in _lines(path):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise DataError(f"{where} must be a JSON object, not {type(fields).__name__}")
        yield where, fields


def _csv_fields(path: Path) -> Iterator[tuple[str, list[str]]]:
    # utf-8-sig, or the byte order mark that spreadsheets write would become part of the first column's name.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            for fields in reader:
                if fields:
                    yield f"{path}:{reader.line_num}", fields
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{reader.line_num + 1} is not valid CSV: {error}") from None


def _named(path: Path, lines: Iterator[tuple[str, list[str]]]) -> Iterator[Row]:
    """Give the fields of each line the names that the first line holds."""
    _, header = next(lines, ("", []))
    for where, fields in lines:
        if len(fields) != len(header):
            raise DataError(f"{where}: {len(fields)} fields, but the header of {path.name} has {len(header)}")
        yield where, dict(zip(header, fields, strict=True))


def _parquet(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", fields
    except pa.ArrowException as error:
        raise DataError(f"{path}:{number + 1}: the Parquet file cannot be read: {error}") from None
