"""TREC files: judgements (`query 0 document gain`), and runs (`query Q0 document rank score tag`)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from embedtrain.data.sources.problems import shorten
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.rows import Row, text_lines
from embedtrain.evaluation.types import RetrievalSet

QUERY_ID = ("query-id", "query_id", "qid")
DOCUMENT_ID = ("corpus-id", "corpus_id", "pid", "docid")
GAIN = ("score",)


def judgement_rows(path: Path) -> Iterator[Row]:
    """The judgements of a file: BEIR's three fields between tabs, or TREC's four between blanks or tabs.

    Raises:
        DataError: the file cannot be read, or a line has another number of fields.
    """
    for place, (where, line) in enumerate(text_lines(path)):
        fields = line.split("\t")
        if len(fields) != 3:
            trec = line.split()
            if len(trec) != 4:
                raise DataError(
                    f"{where}: {len(fields)} fields, but a judgement is query-id, corpus-id, score, with tabs, "
                    f"or query, 0, document, gain, as trec_eval reads it"
                )
            fields = [trec[0], *trec[2:]]
        # Some sets come without the header; skipping their first line would lose a judgement in silence.
        if place == 0 and not _is_number(fields[2]):
            continue
        yield where, dict(zip((QUERY_ID[0], DOCUMENT_ID[0], GAIN[0]), fields, strict=True))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_run(path: Path) -> dict[str, dict[str, str]]:
    """The documents of each query in a run, by id, with the places they stand at.

    Raises:
        DataError: the file cannot be read or is empty, a line has another number of fields, or a document stands
            there twice for a query.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such run file")
    run: dict[str, dict[str, str]] = {}
    for where, line in text_lines(path):
        fields = line.split()
        if len(fields) != 6:
            raise DataError(
                f"{where}: {len(fields)} fields, but a line of a run is query, Q0, document, rank, score, tag: "
                f"{shorten(line)}"
            )
        query, _, document, *_ = fields
        before = run.setdefault(query, {}).setdefault(document, where)
        if before != where:
            raise DataError(f"{where}: document {document} stands there already for query {query}, at {before}")
    if not run:
        raise DataError(f"{path} is empty")
    return run


def candidates_of(run: Mapping[str, Mapping[str, str]], data: RetrievalSet) -> dict[str, list[str]]:
    """A run as ids of documents by query id; runs write white space within ids as in a URL (`%20`)."""
    written = {name for found in run.values() for name in found if "%" in name}
    plain = {unquote(name): name for name in written}
    # Only where an id is not what is written is the other reading tried.
    spelt = {plain[document]: document for document in data.documents.ids if document in plain} if plain else {}
    for document in data.documents.ids if spelt else ():
        spelt.pop(document, None)
    return {
        query if query in data.queries else unquote(query): [spelt.get(document, document) for document in found]
        for query, found in run.items()
    }
