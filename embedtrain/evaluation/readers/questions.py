"""Retrieval sets from tables of queries with their documents, such as questions and answers."""

from collections.abc import Iterable, Sequence

from embedtrain.evaluation.readers.reranking import texts_of
from embedtrain.evaluation.readers.rows import Row, left_out_notes, nothing_left
from embedtrain.evaluation.types import Corpus, RetrievalSet


def read_questions(
    name: str, rows: Iterable[Row], columns: Sequence[str], source: str
) -> tuple[RetrievalSet, list[str]]:
    """A set of rows with a query, its relevant documents and perhaps other documents, each a text or a list, and notes.

    `columns` are those of the query, the relevant documents, and the other documents. Every query is searched among the
    documents of all rows. Equal queries are one query with the relevant documents of all its rows, and equal documents
    are one document. `source` is the table's name in messages. Raises DataError if a row lacks a column, or no row can
    be used.
    """
    query_column, positive_column, *negative_columns = columns
    queries: dict[str, str] = {}
    documents: dict[str, str] = {}
    judgements: dict[str, dict[str, int]] = {}
    left_out: list[str] = []
    for row in rows:
        text, positives = row.text(query_column), [text for text in texts_of(row, positive_column) if text.strip()]
        others = [text for column in negative_columns if row.has(column) for text in texts_of(row, column)]
        for document in (*positives, *filter(str.strip, others)):
            documents.setdefault(document, f"d{len(documents)}")
        if not text.strip() or not positives:
            left_out.append(row.location)
            continue
        query = queries.setdefault(text, f"q{len(queries)}")
        judgements.setdefault(query, {}).update({documents[document]: 1 for document in positives})
    if not queries:
        raise nothing_left(source, left_out, f"has a {query_column} and a {positive_column}")
    notes = left_out_notes(name, left_out, f"without {query_column} or {positive_column} are left out")
    by_id = {key: text for text, key in queries.items()}
    return RetrievalSet(name, by_id, Corpus(list(documents.values()), list(documents)), judgements), notes
