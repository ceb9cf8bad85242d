"""BEIR folders as training data: judgements and queries put together, a row for each judged query.

The layout is that of Thakur et al., "BEIR" (2021): corpus.jsonl (`_id`, `title`, `text`), queries.jsonl (`_id`,
`text`) and qrels/<split>.tsv (`query-id`, `corpus-id`, `score`, with a header).
"""

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedtrain.data.sources.kinds import Part, PartKind
from embedtrain.data.sources.problems import BadRow, counted, not_utf8, told
from embedtrain.data.sources.streams import lines_of
from embedtrain.errors import DataError

RawRows = Iterator[tuple[int, dict[str, Any] | BadRow]]
Judgement = tuple[str, str, float]  # query, document, score
_QUERY_KEYS = ("query-id", "query_id", "qid")
_DOCUMENT_KEYS = ("corpus-id", "corpus_id", "pid", "docid", "doc_id")
_AT_ONCE = 1 << 16


def judged_rows(part: Part, read: Callable[[Part], RawRows]) -> RawRows:
    """A row for each query that is judged, at the line of its first judgement, in the order of these lines.

    A row is `{"query", "positive_ids", "positive_scores", "negative_ids", "negative_scores"}`: a document of a
    score above 0 is a positive, any other that is judged a hard negative. Of judgements that cannot be read the
    problem comes at its own line.

    Args:
        part: a BEIR folder's.
        read: gives the raw rows of another part.

    Raises:
        DataError: a table cannot be read as a whole, or two queries have one id.
    """
    judgements, queries, _ = part.tables
    table = _Judgements(judgements, read)
    ids, texts = _queries(queries, read)
    names = table.query_names
    places = pc.index_in(names, value_set=ids)

    def rows() -> RawRows:
        for i, (line, documents, scores) in enumerate(table.by_query()):
            location = places[i].as_py()
            if location is None:
                yield line, BadRow(f'query "{names[i]}" is not in {queries.name}')
                continue
            yield line, _row(names[i].as_py(), texts[location].as_py(), documents, scores)

    yield from heapq.merge(rows(), table.problems, key=lambda row: row[0])


def _row(name: str, query: str, documents: list[str], scores: list[float]) -> dict[str, Any] | BadRow:
    judged: dict[str, float] = {}
    for document, score in zip(documents, scores, strict=True):
        if judged.setdefault(document, score) != score:
            return BadRow(f'document "{document}" is judged {judged[document]:g} and {score:g} for query "{name}"')
    positives = {document: score for document, score in judged.items() if score > 0}
    negatives = {document: score for document, score in judged.items() if score <= 0}
    if not positives:
        return BadRow(f'query "{name}" has no document with a score above 0')
    return {
        "query": query,
        "positive_ids": list(positives),
        "positive_scores": list(positives.values()),
        "negative_ids": list(negatives),
        "negative_scores": list(negatives.values()),
    }


class _Judgements:
    """All judgements as arrays: some sets have millions.

    Attributes:
        query_names: of each query, in the order in which they first come.
        problems: of lines that are no judgement.
    """

    def __init__(self, part: Part, read: Callable[[Part], RawRows]) -> None:
        self.problems: list[tuple[int, dict[str, Any] | BadRow]] = []
        chunks: list[pa.RecordBatch] = []
        held: list[tuple[int, Judgement]] = []
        for line, judgement in _tsv_judgements(part.name) if part.kind is PartKind.tsv else _judgements(read(part)):
            if isinstance(judgement, BadRow):
                self.problems.append((line, judgement))
                continue
            held.append((line, judgement))
            if len(held) == _AT_ONCE:
                chunks.append(_batch(held))
                held = []
        table = pa.Table.from_batches([*chunks, _batch(held)])
        queries = table["query"].combine_chunks().dictionary_encode()
        self.query_names = queries.dictionary
        codes = queries.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        self._starts: list[int] = np.searchsorted(codes[order], np.arange(len(self.query_names) + 1)).tolist()
        self._columns = [table[name].combine_chunks().take(order) for name in ("line", "document", "score")]

    def by_query(self) -> Iterator[tuple[int, list[str], list[float]]]:
        """Of each query the line of its first judgement, the documents and their scores."""
        for start, stop in zip(self._starts, self._starts[1:], strict=False):
            lines, documents, scores = (column.slice(start, stop - start).to_pylist() for column in self._columns)
            yield lines[0], documents, scores


def _batch(rows: list[tuple[int, Judgement]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([line for line, _ in rows], pa.int64()),
            pa.array([query for _, (query, _, _) in rows], pa.large_string()),
            pa.array([document for _, (_, document, _) in rows], pa.large_string()),
            pa.array([score for _, (_, _, score) in rows], pa.float64()),
        ],
        ["line", "query", "document", "score"],
    )


def _tsv_judgements(name: str) -> Iterator[tuple[int, Judgement | BadRow]]:
    for number, line in lines_of(name):
        try:
            fields = line.decode("utf-8").rstrip("\r\n").split("\t")
        except UnicodeDecodeError as error:
            yield number, BadRow(not_utf8(line, error.start))
            continue
        if fields == [""] or (number == 1 and _number(fields[-1]) is None):  # the header, which some sets lack
            continue
        if len(fields) != 3:
            found = counted(len(fields), "field")
            yield number, BadRow(f"{found} where a judgement has query-id, corpus-id and score, cut by tabs")
            continue
        yield number, _judgement(*fields)


def _judgements(rows: RawRows) -> Iterator[tuple[int, Judgement | BadRow]]:
    for number, row in rows:
        if isinstance(row, BadRow):
            yield number, row
            continue
        query = next((row[key] for key in _QUERY_KEYS if key in row), None)
        document = next((row[key] for key in _DOCUMENT_KEYS if key in row), None)
        yield number, _judgement(query, document, row.get("score"))


def _judgement(query: object, document: object, score: object) -> Judgement | BadRow:
    for what, value in (("query-id", query), ("corpus-id", document)):
        if not isinstance(value, str | int) or value == "":
            return BadRow(f"{what} must be an id, a text or a whole number, not {told(value)}")
    number = _number(score)
    if number is None:
        return BadRow(f"score must be a number, not {told(score)}")
    return str(query), str(document), number


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _queries(part: Part, read: Callable[[Part], RawRows]) -> tuple[pa.Array, pa.Array]:
    """Ids and texts of the queries."""
    ids: list[pa.Array] = []
    texts: list[pa.Array] = []
    held: list[tuple[str, str]] = []
    for line, row in read(part):
        problem = row if isinstance(row, BadRow) else None
        if not isinstance(row, BadRow):
            name, text = row.get("_id", row.get("id", row.get("query_id"))), row.get("text", row.get("query"))
            if isinstance(name, str | int) and isinstance(text, str):
                held.append((str(name), text))
            else:
                problem = BadRow(f'a query needs "_id" and "text", and this row has: {", ".join(row) or "nothing"}')
        if problem is not None:
            raise DataError(f"{part.location(line)}: {problem}")
        if len(held) == _AT_ONCE:
            ids.append(pa.array([name for name, _ in held], pa.large_string()))
            texts.append(pa.array([text for _, text in held], pa.large_string()))
            held = []
    ids.append(pa.array([name for name, _ in held], pa.large_string()))
    texts.append(pa.array([text for _, text in held], pa.large_string()))
    names = pa.concat_arrays(ids)
    counts = pc.value_counts(names)
    if len(counts) < len(names):
        twice = next(count["values"] for count in counts if count["counts"].as_py() > 1)
        raise DataError(f'{part.name}: two queries have the id "{twice}"')
    return names, pa.concat_arrays(texts)
