"""Retrieval sets: BEIR folders, and putting queries, documents and judgements together from any source.

The layout is that of Thakur et al., "BEIR" (2021): corpus.jsonl (`_id`, `title`, `text`), queries.jsonl
(`_id`, `text`) and qrels/<split>.tsv (`query-id`, `corpus-id`, `score`, with a header).
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from embedtrain.errors import DataError
from embedtrain.evaluation.rows import Row, id_field, number_field, read_rows, text_field, tsv_fields
from embedtrain.evaluation.types import Corpus, RetrievalSet

_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
_ID = ("_id", "id")
_QUERY_ID = ("query-id", "query_id", "qid")
_DOCUMENT_ID = ("corpus-id", "corpus_id", "pid", "docid")
_SPLITS = ("test", "dev", "validation")


def is_beir_folder(folder: Path) -> bool:
    """Whether a folder claims to be a BEIR set, complete or not.

    A copy of a Hub repository may hold corpus.jsonl as well; its README says where the judgements are.
    """
    has_texts = any(_find(folder, name) for name in ("corpus", "queries"))
    return has_texts and (any(folder.glob("qrels/*.tsv")) or not (folder / "README.md").is_file())


def read_beir_folder(folder: Path, name: str, split: str | None) -> tuple[RetrievalSet, list[str]]:
    """Read a BEIR folder.

    Args:
        folder: where corpus, queries and qrels lie.
        name: the set's name.
        split: which file of qrels/; default: test, else dev, else the only one there.

    Returns:
        The set, and notes on what is odd about it.

    Raises:
        DataError: a file is missing, or a line cannot be used.
    """
    corpus, queries = _need(folder, "corpus"), _need(folder, "queries")
    there = sorted(path.stem for path in folder.glob("qrels/*.tsv"))
    qrels = folder / "qrels" / f"{choose_split(there, split, f'{folder}/qrels')}.tsv"
    return assemble(name, read_rows(corpus), read_rows(queries), _qrels_rows(qrels), [corpus, queries, qrels])


def read_corpus(path: Path) -> dict[str, str]:
    """The documents of a BEIR folder, or of a corpus file itself: id -> text.

    Raises:
        DataError: there is none, or a line cannot be used.
    """
    corpus = _need(path, "corpus") if path.is_dir() else path
    if not corpus.is_file():
        raise DataError(f"{path}: there is no such folder or file")
    return _texts(read_rows(corpus), corpus, with_title=True)


def choose_split(there: Sequence[str], asked: str | None, where: str) -> str:
    """Which split to take: the one asked for, else test, dev or validation, else the only one.

    Raises:
        DataError: it is not there, or none was asked for and it could be several.
    """
    if not there:
        raise DataError(f"{where} holds no split: expected one such as {_SPLITS[0]}")
    found = next((s for s in _SPLITS if s in there), None if len(there) > 1 else there[0]) if asked is None else asked
    if found is None:
        raise DataError(f"{where} holds the splits {', '.join(there)}: say which with split=")
    if found not in there:
        raise DataError(f"{where} holds no split {found!r}, only {', '.join(there)}")
    return found


def assemble(
    name: str, corpus: Iterable[Row], queries: Iterable[Row], qrels: Iterable[Row], sources: Sequence[object]
) -> tuple[RetrievalSet, list[str]]:
    """Make a set of three tables, and tell what in them does not fit together.

    Args:
        name: the set's name.
        corpus: rows with an id, a text and perhaps a title.
        queries: rows with an id and a text.
        qrels: rows with a query id, a document id and a gain.
        sources: what to call the three in messages.

    Raises:
        DataError: a table is empty, an id stands for two texts, or no judgement can be used.
    """
    documents = _texts(corpus, sources[0], with_title=True)
    texts = _texts(queries, sources[1], with_title=False)
    judgements: dict[str, dict[str, int]] = {}
    unknown_queries: set[str] = set()
    for where, fields in qrels:
        query, document = id_field(fields, _QUERY_ID, where), id_field(fields, _DOCUMENT_ID, where)
        gain = number_field(fields, ("score",), where)
        if gain != int(gain):
            raise DataError(f"{where}: score must be a whole number, not {gain}")
        if query not in texts:
            unknown_queries.add(query)
            continue
        before = judgements.setdefault(query, {}).setdefault(document, int(gain))
        if before != int(gain):
            raise DataError(f"{where}: document {document} is judged {int(gain)} for query {query}, before {before}")
    _require_usable(judgements, documents, texts, unknown_queries, sources)
    missing = [d for judged in judgements.values() for d in judged if d not in documents]
    notes = []
    if unknown_queries:
        notes.append(
            f"{name}: {len(unknown_queries)} judged queries are not in {sources[1]} and are left out "
            f"(the first: {min(unknown_queries)})"
        )
    if missing:
        notes.append(
            f"{name}: {len(missing)} judgements are of documents that are not in {sources[0]}; they count as "
            f"relevant and never found, as in trec_eval (the first: {missing[0]})"
        )
    return RetrievalSet(name, texts, Corpus.of(documents), judgements), notes


def _require_usable(
    judgements: dict[str, dict[str, int]],
    documents: dict[str, str],
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
    judged = [document for of_query in judgements.values() for document in of_query]
    if not any(document in documents for document in judged):
        raise DataError(
            f"{sources[2]}: none of its {len(set(judged))} documents is in {sources[0]}; it says {judged[0]!r} "
            f"where the documents are called {next(iter(documents))!r}"
        )
    if not any(gain > 0 for of_query in judgements.values() for gain in of_query.values()):
        raise DataError(f"{sources[2]}: no judgement is above 0, so nothing is relevant")


def _texts(rows: Iterable[Row], source: object, *, with_title: bool) -> dict[str, str]:
    texts: dict[str, str] = {}
    for where, fields in rows:
        key, text = id_field(fields, _ID, where), text_field(fields, ("text",), where)
        if with_title and fields.get("title") is not None:
            text = text_field(fields, ("title",), where) + " " + text
        text = text.strip() if with_title else text
        if texts.setdefault(key, text) != text:
            raise DataError(f"{where}: the id {key} stands for another text before")
    if not texts:
        raise DataError(f"{source} is empty")
    return texts


def _qrels_rows(path: Path) -> Iterator[Row]:
    for place, (where, fields) in enumerate(tsv_fields(path)):
        if len(fields) != 3:
            raise DataError(f"{where}: {len(fields)} fields, but a judgement is query-id, corpus-id, score, with tabs")
        # Some sets come without the header; skipping their first line would lose a judgement in silence.
        if place == 0 and not fields[2].strip().lstrip("-").isdigit():
            continue
        yield where, dict(zip(("query-id", "corpus-id", "score"), fields, strict=True))


def _find(folder: Path, name: str) -> Path | None:
    return next((path for ending in _ENDINGS if (path := folder / f"{name}{ending}").is_file()), None)


def _need(folder: Path, name: str) -> Path:
    path = _find(folder, name)
    if path is None:
        raise DataError(f"{folder} holds no {' or '.join(name + ending for ending in _ENDINGS)}")
    return path
