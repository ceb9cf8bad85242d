"""Rows of tables with the checks of their values, and sets from rows of a query with its documents."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from embedtrain.data.sources import values
from embedtrain.data.sources.part_reader import PartPiece, PartReader
from embedtrain.data.sources.parts import PartKind, SourcePart
from embedtrain.data.sources.table_rows import no_progress_bars
from embedtrain.data.sources.values import BadRow, shorten
from embedtrain.errors import DataError
from embedtrain.evaluation.types import Corpus, RetrievalSet

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table. Every method raises DataError with the location where a value is missing or wrong."""

    location: str  # `file:line`, which begins every message
    fields: Mapping[str, Any]

    def key(self, *names: str) -> str:
        """The first of these columns that exists."""
        for name in names:
            if name in self.fields:
                return name
        present = values.list_names(self.fields)
        raise self.error(f"no column {' or '.join(map(repr, names))}; there are: {present}")

    def has(self, *names: str) -> bool:
        """Whether one of these columns exists."""
        return any(name in self.fields for name in names)

    def text(self, *names: str) -> str:
        """The text of the first of these columns that exists; it may be empty."""
        key = self.key(*names)
        return self.check(values.string, self.fields[key], key)

    def id(self, *names: str) -> str:
        """The id of the first of these columns that exists."""
        key = self.key(*names)
        name = self.check(values.identifier, self.fields[key], key)
        if not name:
            raise self.error(f"{key} is empty and must be an id")
        return name

    def number(self, *names: str) -> float:
        """The number of the first of these columns that exists, which may be written as a text."""
        key = self.key(*names)
        return self.check(values.number, values.parse_cell(self.fields[key]), key)

    def check(self, check: Callable[[Any, str], T], value: object, name: str) -> T:
        """The value as a check of `data.sources.values` returns it."""
        try:
            return check(value, name)
        except BadRow as bad:
            raise self.error(str(bad)) from None

    def error(self, problem: str) -> DataError:
        """An error with the row's location."""
        return DataError(f"{self.location}: {problem}")


def table_name(part: SourcePart) -> str:
    """A table's name in messages: a path, or a Hub id with configuration and split."""
    qualifiers = [name for name in (part.subset, part.split) if name is not None]
    return f"{part.name} ({', '.join(qualifiers)})" if qualifiers else part.name


def read_raw_rows(part: SourcePart) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The unchecked rows of a table, with their pictures as PictureValue."""
    with no_progress_bars() if part.kind is PartKind.hub else contextlib.nullcontext():
        for line in PartReader().lines(PartPiece(part)):
            if line.row is not None:
                yield line.number, line.row


def read_rows(part: SourcePart) -> Iterator[Row]:
    """The rows of a table. Raises DataError if the table or a row cannot be read."""
    name = table_name(part)
    has_cells = part.kind in (PartKind.csv, PartKind.tsv)
    for number, fields in read_raw_rows(part):
        location = f"{name}:{number}"
        if isinstance(fields, BadRow):
            raise DataError(f"{location}: {fields}")
        if not has_cells:
            yield Row(location, fields)
            continue
        row = Row(location, {key: cell or "" for key, cell in fields.items()})  # an empty cell is an empty text
        if any(isinstance(cell, str) and cell.lstrip().startswith("[") for cell in row.fields.values()):
            row = Row(location, row.check(lambda cells, _: _with_lists(cells), row.fields, ""))
        yield row


def _with_lists(cells: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of a row, those that hold a list of texts as lists."""
    return {key: values.list_in_cell(cell) if isinstance(cell, str) else cell for key, cell in cells.items()}


def first_rows(part: SourcePart, count: int) -> list[Row]:
    """The first rows of a table. Raises DataError if the table cannot be read, or is empty."""
    rows = list(itertools.islice(read_rows(part), count))
    if not rows:
        raise DataError(f"{table_name(part)} is empty")
    return rows


def first_row(part: SourcePart) -> Row:
    """The first row of a table. Raises DataError if the table cannot be read, or is empty."""
    return first_rows(part, 1)[0]


def nothing_left(source: str, left_out: Sequence[str], has: str) -> DataError:
    """The error about a table of which no row can be used; `left_out` are the locations of its rows."""
    return DataError(source + (f": none of its {len(left_out)} rows {has}" if left_out else " is empty"))


def left_out_notes(name: str, left_out: Sequence[str], which: str) -> list[str]:
    """The note about the rows of a set that are left out, if there are any."""
    return [f"{name}: {len(left_out)} rows {which} (the first: {left_out[0]})"] if left_out else []


def read_reranking(
    name: str, rows: Iterable[Row], columns: Sequence[str], score: str | None, source: str, split: str
) -> tuple[RetrievalSet, list[str]]:
    """A set of queries and the documents to rank for each, and notes.

    `columns` are those of the query, its documents, and documents that are not relevant, each a text or a list of
    texts; `score` is that of the relevance of the documents, without which all of them are relevant. As in mteb, a
    query without relevant or without other documents is left out; every text of a row is a document of its own, even if
    texts are equal, with an id that sorts others before relevant ones of the same score. Rows of one document each are
    one query where their queries are equal. `source` is the table's name in messages. Raises DataError if a row lacks a
    column, or no row can be used.
    """
    found: dict[str, tuple[str, str, list[tuple[str, int]]]] = {}  # location, query and its documents
    for row in rows:
        text = row.text(columns[0])
        is_list = score is None or isinstance(row.fields[row.key(columns[1])], list | dict)
        _, _, documents = found.setdefault(row.location if is_list else f"query {text}", (row.location, text, []))
        documents += graded_documents(row, columns, score)
    queries: dict[str, str] = {}
    ids: list[str] = []
    texts: list[str] = []
    judgements: dict[str, dict[str, int]] = {}
    candidates: dict[str, range] = {}
    left_out: list[str] = []
    for location, text, documents in found.values():
        if len({gain > 0 for _, gain in documents}) < 2:
            left_out.append(location)
            continue
        query = f"{split}_query{len(queries)}"
        queries[query] = text
        start = len(ids)
        for prefix, is_relevant in (("apositive", True), ("negative", False)):
            chosen = [(document, gain) for document, gain in documents if (gain > 0) == is_relevant]
            names = [f"{prefix}_{query}_{number:05}" for number in range(len(chosen))]
            judgements.setdefault(query, {}).update(zip(names, (gain for _, gain in chosen), strict=True))
            ids += names
            texts += [document for document, _ in chosen]
        candidates[query] = range(start, len(ids))
    if not queries:
        raise nothing_left(
            source,
            left_out,
            "has both positives and negatives, so nothing can be ranked: add "
            "negatives, or write queries, corpus and qrels, a retrieval set whose corpus is the pool",
        )
    notes = left_out_notes(name, left_out, "without positives or without negatives are left out, as in mteb")
    return RetrievalSet(name, queries, Corpus(ids, texts), judgements, candidates), notes


def read_questions(
    name: str, rows: Iterable[Row], columns: Sequence[str], score: str | None, source: str
) -> tuple[RetrievalSet, list[str]]:
    """A set of rows with a query, its relevant documents and perhaps other documents, each a text or a list, and notes.

    `columns` are those of the query, the relevant documents, and the other documents; `score` is that of the relevance
    of the documents, which are then not all relevant. Every query is searched among the documents of all rows. Equal
    queries are one query with the relevant documents of all its rows, and equal documents are one document. `source` is
    the table's name in messages. Raises DataError if a row lacks a column, or no row can be used.
    """
    queries: dict[str, str] = {}
    documents: dict[str, str] = {}
    judgements: dict[str, dict[str, int]] = {}
    locations: dict[str, str] = {}  # of the first row of a query
    left_out: list[str] = []
    for row in rows:
        # Documents of rows without a query, as in ViDoRe, are searched as others.
        text = row.check(values.optional_string, row.fields[row.key(columns[0])], columns[0])
        graded = [(document, gain) for document, gain in graded_documents(row, columns, score) if document.strip()]
        for document, _ in graded:
            documents.setdefault(document, f"d{len(documents)}")
        judged = graded if score is not None else [(document, gain) for document, gain in graded if gain > 0]
        if not text.strip() or not judged:
            left_out.append(row.location)
            continue
        locations.setdefault(text, row.location)
        query = queries.setdefault(text, f"q{len(queries)}")
        gains = judgements.setdefault(query, {})
        for document, gain in judged:
            before = gains.setdefault(documents[document], gain)
            if before != gain:
                raise row.error(f"the document {shorten(document)} is judged {gain}, before {before}, for one query")
    for text, query in list(queries.items()):
        if not any(gain > 0 for gain in judgements[query].values()):
            left_out.append(locations[text])
            del queries[text], judgements[query]
    if not queries:
        raise nothing_left(source, left_out, f"has a {columns[0]} and a relevant {columns[1]}")
    notes = left_out_notes(name, left_out, f"without {columns[0]} or {columns[1]} are left out")
    by_id = {key: text for text, key in queries.items()}
    return RetrievalSet(name, by_id, Corpus(list(documents.values()), list(documents)), judgements), notes


def graded_documents(row: Row, columns: Sequence[str], score: str | None) -> list[tuple[str, int]]:
    """The documents of a row and their relevance, that of the columns after the second 0."""
    texts = texts_of(row, columns[1])
    marks = row.check(values.marks_of, row.fields[columns[1]], columns[1])
    if score is None:
        gains = [1] * len(texts) if marks is None else [int(mark) for mark in marks]
    else:
        value = values.parse_cell(row.fields[row.key(score)])
        grades = value if isinstance(value, list) else [value] * min(1, len(texts))
        if len(grades) != len(texts):
            raise row.error(f"{score} has {len(grades)} elements and {columns[1]} has {len(texts)}: give one for each")
        numbers = [row.check(values.number, values.parse_cell(grade), score) for grade in grades]
        fraction = next((number for number in numbers if not number.is_integer()), None)
        if fraction is not None:
            raise row.error(
                f"{score} is {fraction:g}, and relevance is a whole number, above 0 for a relevant document: round it, "
                f"or leave it out with columns: [{columns[0]},{columns[1]}]"
            )
        gains = [int(number) for number in numbers]
    others = [text for column in columns[2:] if row.has(column) for text in texts_of(row, column)]
    return [*zip(texts, gains, strict=True), *((text, 0) for text in others)]


def texts_of(row: Row, key: str) -> list[str]:
    """The items of a column that holds one, a list of them, or nothing: texts, pictures, or objects with these."""
    value = row.fields[row.key(key)]
    if value is None or value == "":  # an empty cell of a CSV file
        return []
    if isinstance(value, dict):
        value = values.objects_in(value)
    return [row.check(values.string, text, key) for text in (value if isinstance(value, list) else [value])]
