"""Rows as they are stored, unchecked: those of any part, and of JSONL -> (line, row or problem)."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from embedtrain.data.sources.beir import judged_rows
from embedtrain.data.sources.json_lists import json_list_rows
from embedtrain.data.sources.kinds import Part, PartKind
from embedtrain.data.sources.problems import BadRow, json_problem, not_utf8, shorten, told
from embedtrain.data.sources.separated import PlainTsv, table_rows
from embedtrain.data.sources.streams import lines_of
from embedtrain.data.sources.tables import arrow_rows, dataset_rows, open_dataset, parquet_rows

__all__ = ["BadRow", "RawRow", "json_row", "json_rows", "lines_of", "not_utf8", "raw_rows", "shorten", "table_rows"]

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
        case PartKind.jsonl:
            return json_rows(part.name)
        case PartKind.json:
            return json_list_rows(part.name, _DECODER)
        case PartKind.csv:
            return table_rows(part.name, csv.excel)
        case PartKind.tsv:
            return table_rows(part.name, PlainTsv)
        case PartKind.parquet:
            return parquet_rows(part.name, columns)
        case PartKind.arrow:
            return arrow_rows(part.name, columns)
        case PartKind.hub:
            data = open_dataset(part, subset, split)
            return dataset_rows(data, part.name, columns)
        case PartKind.beir:
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
        return BadRow(f"broken JSON: {json_problem(error)} at column {error.colno}: {shorten(error.doc)}")
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
