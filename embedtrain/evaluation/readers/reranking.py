"""Sets from tables of queries with their documents, to search or to rank, and candidates from TREC run files."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from embedtrain.data.cache.document_store import select_texts
from embedtrain.data.sources import values
from embedtrain.data.sources.files import read_lines
from embedtrain.data.sources.values import not_utf8, shorten
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.rows import Row, left_out_notes, nothing_left
from embedtrain.evaluation.types import RUN_TAG, Corpus, RetrievalSet


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
        text = row.text(columns[0])
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
    """The texts of a column that holds a text, a list of texts, or nothing; each may be an object with a text."""
    value = row.fields[row.key(key)]
    if value is None or value == "":  # an empty cell of a CSV file
        return []
    if isinstance(value, dict):
        value = values.objects_in(value)
    return [row.check(values.string, text, key) for text in (value if isinstance(value, list) else [value])]


def read_run(path: Path) -> dict[str, dict[str, str]]:
    """The documents of each query in a TREC run (`query Q0 document rank score tag`), with their locations by id.

    They are in the order of trec_eval: by descending score, in float32, and descending id. Ids of runs that embedtrain
    has written are decoded; in other runs they are as written.

    Raises DataError if the file is unreadable or empty, a line has too few or many fields, a score is no number, or a
    document is repeated.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such run file")
    run: dict[str, dict[str, str]] = {}
    scores: dict[tuple[str, str], float] = {}
    for location, line in _text_lines(path):
        fields = line.split()
        if len(fields) != 6:
            raise DataError(
                f"{location}: {len(fields)} fields, but a line of a run is query, Q0, document, rank, score, tag: "
                f"{shorten(line)}"
            )
        query, _, document, _, score, tag = fields
        if tag == RUN_TAG:
            query, document = unquote(query), unquote(document)
        before = run.setdefault(query, {}).setdefault(document, location)
        if before != location:
            raise DataError(f"{location}: document {document} is repeated for query {query}, first at {before}")
        try:
            scores[query, document] = float(np.float32(score))
        except ValueError:
            scores[query, document] = math.nan
        if math.isnan(scores[query, document]):
            raise DataError(f"{location}: the score is not a number: {shorten(score)}")
    if not run:
        raise DataError(f"{path} is empty")
    return {
        query: dict(sorted(locations.items(), key=lambda item: (scores[query, item[0]], item[0]), reverse=True))
        for query, locations in run.items()
    }


def _text_lines(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in read_lines(path):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: {not_utf8(line, error.start)}") from None
        if text.strip():
            yield f"{path}:{number}", text


def with_candidates(
    data: RetrievalSet, ranked: Mapping[str, Collection[str]], source: str, first_stage: str | None = None
) -> tuple[RetrievalSet, list[str]]:
    """The set with the documents to rank for each query, without other documents, and notes on mismatches.

    A judged query without candidates stays: it finds nothing and counts as 0, as with trec_eval -c. `ranked` holds
    document ids by query id, best first if `first_stage` names what has ranked them; `source` is its name in messages.
    Raises DataError if no judged query has a
    candidate that is a document.
    """
    judged = data.judged_queries
    candidate_ids = {document for query in judged for document in ranked.get(query, ())}
    rows = [row for row, document in enumerate(data.documents.ids) if document in candidate_ids]
    ids = list(select_texts(data.documents.ids, rows))
    indices = {document: index for index, document in enumerate(ids)}
    candidates = {
        query: list(dict.fromkeys(indices[document] for document in ranked.get(query, ()) if document in indices))
        for query in judged
    }
    if not ids:
        if candidate_ids:
            kind, unknown, example = "documents", candidate_ids, data.documents.ids[0]
        else:
            kind, unknown, example = "judged queries", set(ranked), judged[0]
        raise DataError(
            f"{source}: none of its {len(unknown)} {kind.split()[-1]} is one of {data.name}; it has "
            f"{min(unknown, default='')!r} where {kind} are called {example!r}"
        )
    notes = []
    missing = [query for query in judged if query not in ranked]
    if missing:
        notes.append(
            f"{data.name}: {len(missing)} judged queries have no candidates in {source} and count as 0 "
            f"(the first: {missing[0]})"
        )
    if len(candidate_ids) > len(ids):
        notes.append(
            f"{data.name}: {len(candidate_ids) - len(ids)} candidates of {source} are not documents and are left out "
            f"(the first: {min(candidate_ids.difference(ids))})"
        )
    documents = Corpus(ids, select_texts(data.documents.texts, rows))
    return replace(data, documents=documents, candidates=candidates, first_stage=first_stage), notes
