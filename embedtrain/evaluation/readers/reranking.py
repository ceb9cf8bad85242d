"""Reranking sets: rows of a query with its positives and negatives, and candidates given for a retrieval set."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from embedtrain.errors import DataError
from embedtrain.evaluation.readers.mapped_texts import select_texts
from embedtrain.evaluation.readers.rows import Row, field_of, text_field, text_of
from embedtrain.evaluation.types import Corpus, RetrievalSet

QUERY = ("query",)
POSITIVE = ("positive",)
NEGATIVE = ("negative",)


def read_reranking(name: str, rows: Iterable[Row], source: str, split: str) -> tuple[RetrievalSet, list[str]]:
    """Make a set of rows with `query`, `positive` and `negative`, each a list of texts or one.

    As mteb has it: a row without positives or without negatives is left out; every text of a row is a document of its
    own, equal or not, with an id by which negatives come before positives of the same score.

    Args:
        name: the set's name.
        rows: the table.
        source: what to call the table in messages.
        split: what ids are made of, and nothing else.

    Returns:
        The set, and notes on rows that are left out.

    Raises:
        DataError: a row lacks a column, or no row can be used.
    """
    queries: dict[str, str] = {}
    ids: list[str] = []
    texts: list[str] = []
    judgements: dict[str, dict[str, int]] = {}
    candidates: dict[str, range] = {}
    left_out: list[str] = []
    for where, fields in rows:
        text = text_field(fields, QUERY, where)
        positives, negatives = _texts(fields, POSITIVE[0], where), _texts(fields, NEGATIVE[0], where)
        if not positives or not negatives:
            left_out.append(where)
            continue
        query = f"{split}_query{len(queries)}"
        queries[query] = text
        start = len(ids)
        for what, gain, some in (("apositive", 1, positives), ("negative", 0, negatives)):
            own = [f"{what}_{query}_{number:05}" for number in range(len(some))]
            judgements.setdefault(query, {}).update(dict.fromkeys(own, gain))
            ids += own
            texts += some
        candidates[query] = range(start, len(ids))
    if not queries:
        what = f": none of its {len(left_out)} rows has both positives and negatives, so nothing can be ranked"
        raise DataError(source + (what if left_out else " is empty"))
    notes = []
    if left_out:
        notes.append(
            f"{name}: {len(left_out)} rows without positives or without negatives are left out, as in mteb "
            f"(the first: {left_out[0]})"
        )
    return RetrievalSet(name, queries, Corpus(ids, texts), judgements, candidates), notes


def with_candidates(
    data: RetrievalSet, ranked: Mapping[str, Sequence[str]], source: str
) -> tuple[RetrievalSet, list[str]]:
    """The same set, of which only given documents are ranked for each query; documents of no query are dropped.

    A judged query without candidates stays: it finds nothing and counts as 0, as trec_eval -c has it.

    Args:
        data: queries, documents and judgements.
        ranked: ids of documents by query id, in any order.
        source: what to call them in messages.

    Returns:
        The set, and notes on queries and documents that do not fit together.

    Raises:
        DataError: no judged query has a candidate that is a document.
    """
    judged = data.judged_queries
    wanted = {document for query in judged for document in ranked.get(query, ())}
    ids: list[str] = []
    rows: list[int] = []
    for row, document in enumerate(data.documents.ids):
        if document in wanted:
            ids.append(document)
            rows.append(row)
    places = {document: place for place, document in enumerate(ids)}
    candidates = {
        query: list(dict.fromkeys(places[document] for document in ranked.get(query, ()) if document in places))
        for query in judged
    }
    if not ids:
        if wanted:
            what, unknown, called = "documents", wanted, data.documents.ids[0]
        else:
            what, unknown, called = "judged queries", set(ranked), judged[0]
        raise DataError(
            f"{source}: of its {len(unknown)} {what.split()[-1]} none is one of {data.name}; it says "
            f"{min(unknown, default='')!r} where {what} are called {called!r}"
        )
    notes = []
    missing = [query for query in judged if query not in ranked]
    if missing:
        notes.append(
            f"{data.name}: {len(missing)} judged queries have no candidates in {source} and count as 0 "
            f"(the first: {missing[0]})"
        )
    if len(wanted) > len(ids):
        notes.append(
            f"{data.name}: {len(wanted) - len(ids)} candidates of {source} are no documents and are left out "
            f"(the first: {min(wanted.difference(ids))})"
        )
    documents = Corpus(ids, select_texts(data.documents.texts, rows))
    return replace(data, documents=documents, candidates=candidates), notes


def _texts(fields: Mapping[str, Any], name: str, where: str) -> list[str]:
    value = field_of(fields, (name,), where)
    if value is None or value == "":  # an empty cell of a CSV file
        return []
    some = value if isinstance(value, list) else [value]
    return [text_of(one, (name,), where) for one in some]
