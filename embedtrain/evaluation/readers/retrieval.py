"""Retrieval sets: putting queries, documents and judgements together, wherever they were read from."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from embedtrain.errors import DataError
from embedtrain.evaluation.readers.corpus import ID
from embedtrain.evaluation.readers.rows import Row, id_field, number_field, text_field
from embedtrain.evaluation.readers.trec import DOCUMENT_ID, GAIN, QUERY_ID
from embedtrain.evaluation.types import Corpus, RetrievalSet

_INSTRUCTION = ("instruction",)


def read_queries(rows: Iterable[Row], source: object, instructions: Iterable[Row] = ()) -> dict[str, str]:
    """Texts by id of rows with an id and a text.

    Args:
        rows: the queries.
        source: what to call them in messages.
        instructions: rows with a query id and an instruction, which follows the query's text after a blank, as in
            mteb; so does an `instruction` of the query's own row.

    Raises:
        DataError: a row cannot be used, an id stands for two texts, or there is none.
    """
    told = {
        id_field(fields, QUERY_ID, where): text_field(fields, _INSTRUCTION, where) for where, fields in instructions
    }
    texts: dict[str, str] = {}
    for where, fields in rows:
        key, text = id_field(fields, ID, where), text_field(fields, ("text",), where)
        own = text_field(fields, _INSTRUCTION, where) if fields.get(_INSTRUCTION[0]) is not None else told.get(key)
        text = text if own is None else f"{text} {own}"
        if texts.setdefault(key, text) != text:
            raise DataError(f"{where}: the id {key} stands for another text before")
    if not texts:
        raise DataError(f"{source} is empty")
    return texts


def assemble(
    name: str, documents: Corpus, queries: dict[str, str], qrels: Iterable[Row], sources: Sequence[object]
) -> tuple[RetrievalSet, list[str]]:
    """Make a set of three tables, and tell what in them does not fit together.

    Args:
        name: the set's name.
        documents: what is searched.
        queries: texts by id.
        qrels: rows with a query id, a document id and a gain.
        sources: what to call the three in messages: documents, queries, judgements.

    Returns:
        The set, and notes on what is odd about it.

    Raises:
        DataError: a judgement cannot be used, or none can.
    """
    judgements: dict[str, dict[str, int]] = {}
    unknown_queries: set[str] = set()
    for where, fields in qrels:
        query, document = id_field(fields, QUERY_ID, where), id_field(fields, DOCUMENT_ID, where)
        gain = number_field(fields, GAIN, where)
        if gain != int(gain):
            raise DataError(f"{where}: score must be a whole number, not {gain}")
        if query not in queries:
            unknown_queries.add(query)
            continue
        before = judgements.setdefault(query, {}).setdefault(document, int(gain))
        if before != int(gain):
            raise DataError(f"{where}: document {document} is judged {int(gain)} for query {query}, before {before}")
    judged = {document for gains in judgements.values() for document in gains}
    # One pass over the ids, of which there may be millions, and no table of them.
    known = {document for document in documents.ids if document in judged}
    _require_usable(judgements, known, documents, queries, unknown_queries, sources)
    return RetrievalSet(name, queries, documents, judgements), _notes(name, judgements, known, unknown_queries, sources)


def _notes(
    name: str,
    judgements: Mapping[str, Mapping[str, int]],
    known: Collection[str],
    unknown_queries: set[str],
    sources: Sequence[object],
) -> list[str]:
    notes = []
    if unknown_queries:
        notes.append(
            f"{name}: {len(unknown_queries)} judged queries are not in {sources[1]} and are left out "
            f"(the first: {min(unknown_queries)})"
        )
    missing = [document for gains in judgements.values() for document in gains if document not in known]
    if missing:
        notes.append(
            f"{name}: {len(missing)} judgements are of documents that are not in {sources[0]}; they count as "
            f"relevant and never found, as in trec_eval (the first: {missing[0]})"
        )
    hopeless = [query for query, gains in judgements.items() if not any(gain > 0 for gain in gains.values())]
    if hopeless:
        notes.append(
            f"{name}: {len(hopeless)} judged queries have no relevant document and count as 0, as in trec_eval; "
            f"mteb leaves them out (the first: {hopeless[0]})"
        )
    return notes


def _require_usable(
    judgements: dict[str, dict[str, int]],
    known: Collection[str],
    documents: Corpus,
    queries: dict[str, str],
    unknown_queries: set[str],
    sources: Sequence[object],
) -> None:
    """Refuse judgements on which every model would score 0; mostly ids of another release or numbering."""
    if not judgements:
        if unknown_queries:
            raise DataError(
                f"{sources[2]}: none of its {len(unknown_queries)} queries is in {sources[1]}; it says "
                f"{min(unknown_queries)!r} where the queries are called {next(iter(queries))!r}"
            )
        raise DataError(f"{sources[2]} holds no judgement")
    if not known:
        judged = [document for gains in judgements.values() for document in gains]
        raise DataError(
            f"{sources[2]}: none of its {len(set(judged))} documents is in {sources[0]}; it says {judged[0]!r} "
            f"where the documents are called {documents.ids[0]!r}"
        )
    if not any(gain > 0 for gains in judgements.values() for gain in gains.values()):
        raise DataError(f"{sources[2]}: no judgement is above 0, so nothing is relevant")
