"""Rows as text files hold them, unchecked: JSONL, CSV and TSV -> (line, row or problem); and any other part's rows."""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from embedtrain.data.formats.beir import judged_rows
from embedtrain.data.formats.json_lists import json_list_rows
from embedtrain.data.formats.kinds import Kind, Part
from embedtrain.data.formats.problems import BadRow, not_utf8, shortened, told
from embedtrain.data.formats.streams import lines_of
from embedtrain.data.formats.tables import arrow_rows, dataset_rows, open_dataset, parquet_rows
from embedtrain.errors import DataError

__all__ = ["BadRow", "RawRow", "json_row", "json_rows", "lines_of", "not_utf8", "raw_rows", "shortened", "table_rows"]

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
            return json_rows(part.name)
        case Kind.json:
            return json_list_rows(part.name, _DECODER)
        case Kind.csv:
            return table_rows(part.name, csv.excel)
        case Kind.tsv:
            return table_rows(part.name, PlainTsv)
        case Kind.parquet:
            return parquet_rows(part.name, columns)
        case Kind.arrow:
            return arrow_rows(part.name, columns)
        case Kind.hub:
            data = open_dataset(part.name, part.subset or subset, part.split or split)
            return dataset_rows(data, part.name, columns)
        case Kind.beir:
            return judged_rows(part, lambda table: raw_rows(table, subset=subset, split=split, columns=None))


def json_rows(path: Path | str) -> Iterator[RawRow]:
    """The rows of a JSONL file, one JSON object a line. Blank lines are passed over, but counted."""
    for number, line in lines_of(path):
        if line.strip():
            yield number, json_row(line)


def json_row(line: bytes) -> dict[str, Any] | BadRow:
    """The row that a line holds, or what is wrong with it."""
    try:
        row = _DECODER.decode(line.decode("utf-8").rstrip())  # else a text that is cut short ends in a line end
    except BadRow as bad:
        return bad
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


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):  # JSON's reader would keep the last in silence
        names = [name for name, _ in pairs]
        raise BadRow(f'this row has "{next(name for name in names if names.count(name) > 1)}" twice')
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_each_key_once)


class PlainTsv(csv.excel_tab):
    """Tab-separated values as data sets publish them: a quotation mark is a character like any other."""

    quoting = csv.QUOTE_NONE


def table_rows(path: Path | str, dialect: type[csv.Dialect]) -> Iterator[RawRow]:
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


def _decoded(path: Path | str, wrong_bytes: dict[int, str]) -> Iterator[str]:
    """Lines as text; what is wrong with a line's bytes is put in `wrong_bytes` under its number."""
    for number, line in lines_of(path):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            wrong_bytes[number] = not_utf8(line, error.start)
            yield line.decode("utf-8", "replace")


def _header(path: Path | str, cells: list[str], problem: str | None) -> list[str]:
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
