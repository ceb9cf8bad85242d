"""The documents that negatives are found among, one after the other: those of rows, of their corpora, and more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.config.recipe import TrainSource
from embedtrain.config.revisions import split_revision
from embedtrain.data.cache.row_table import ArrowRows, RowStore
from embedtrain.data.sources import values
from embedtrain.data.sources.files import raw_rows
from embedtrain.data.sources.kinds import Part
from embedtrain.data.sources.pieces import Parts
from embedtrain.data.sources.problems import BadRow
from embedtrain.data.sources.sources import parts_of
from embedtrain.errors import DataError
from embedtrain.mine.sources import MinedSource

Told = Callable[[str, int, int], None]
_TEXTS = ("text", "contents", "passage", "document_text")
_IDS = ("docid", "_id", "id", "doc_id", "document_id", "pid")
_AT_ONCE = 4096
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Documents:
    """Some documents in their order.

    Attributes:
        texts: any of them may stand more than once.
        ids: of each, "" for one that has none; empty where none has.
        source: whose rows name them by these ids; NOBODY's where no row can mean them.
    """

    texts: list[str]
    ids: list[str]
    source: int


def all_documents(sources: Sequence[MinedSource], corpus: Sequence[Part], told: Told) -> Iterator[Documents]:
    """The documents of all rows, positives before negatives, then those of the rows' corpora, then `corpus`.

    Texts of nothing but blanks are left out of corpora: no row may hold one.

    Raises:
        DataError: a document that cannot be read, with its place.
    """
    total = sum(len(source.store) for source in sources)
    done = 0
    for number, source in enumerate(sources):
        for rows, documents in _of_rows(source.store, number):
            yield documents
            done += rows
            told("collecting documents of rows", done, total)
    for number, source in enumerate(sources):
        for part in source.document_parts:
            yield from _of_corpus(part, number, told)
    for part in corpus:
        yield from _of_corpus(part, NOBODY, told)


def corpus_parts(paths: Sequence[str]) -> list[Part]:
    """The files that `corpus` means: of a BEIR folder its corpus, of any other all its tables.

    Raises:
        DataError: nothing is there, or nothing that can be read.
        ConfigError: as `parts_of`.
    """
    parts: list[Part] = []
    for path in paths:
        own = sorted(Path(path).expanduser().glob("corpus.*")) if Path(path).expanduser().is_dir() else []
        name, revision = split_revision(path)
        parts += parts_of(TrainSource(path=str(own[0]) if own else name, revision=revision))
    return parts


def corpus_digests(parts: Sequence[Part]) -> list[list[str]]:
    """What the files of corpora hold.

    Raises:
        DataError: a file is gone or cannot be read.
    """
    return [Parts(TrainSource(path=part.name)).digests(part) for part in parts]


def _of_rows(store: RowStore, number: int) -> Iterator[tuple[int, Documents]]:
    assert isinstance(store.rows, ArrowRows)
    has_ids = bool({"positive_ids", "negative_ids"} & store.beside)
    for place in range(len(store.rows.batch_starts) - 1):
        batch = store.rows.batch(place)
        nothing: list[Any] = [None] * batch.num_rows
        positives, negatives, positive_ids, negative_ids = (
            batch.column(name).to_pylist() if name in batch.schema.names else nothing
            for name in ("positives", "negatives", "positive_ids", "negative_ids")
        )
        texts: list[str] = []
        ids: list[str] = []
        for right, wrong, right_ids, wrong_ids in zip(positives, negatives, positive_ids, negative_ids, strict=True):
            texts += right
            texts += wrong
            if has_ids:
                ids += right_ids or [""] * len(right)
                ids += wrong_ids or [""] * len(wrong)
        yield batch.num_rows, Documents(texts, ids, number)


def _of_corpus(part: Part, source: int, told: Told) -> Iterator[Documents]:
    texts: list[str] = []
    ids: list[str] = []
    for line, row in raw_rows(part, subset=None, split="train", columns=None):
        try:
            if isinstance(row, BadRow):
                raise row
            text, name = _document(row, as_rows_name_it=source != NOBODY)
        except BadRow as bad:
            raise DataError(f"{part.place(line)}: {bad}") from None
        if text.strip():
            texts.append(text)
            ids.append(name)
        if len(texts) == _AT_ONCE:
            told(f"collecting documents of {part.name}", line, line)
            yield Documents(texts, ids, source)
            texts, ids = [], []
    yield Documents(texts, ids, source)


def _document(row: dict[str, Any], *, as_rows_name_it: bool) -> tuple[str, str]:
    """A document's text, its title first, and its id if it has one."""
    of_text = next((key for key in _TEXTS if key in row), None)
    if of_text is None and "title" not in row:
        raise BadRow(f'a document needs a "text", and this one has: {", ".join(row) or "nothing"}')
    of_id = next((key for key in _IDS if key in row), None)
    name = "" if of_id is None else values.identifier(row[of_id], f'"{of_id}"')
    title, text = row.get("title"), row.get(of_text or "text")
    whole = values.titled(title, text, f'"{of_text}"')
    # Blanks around a text alone stay: the same text in a row has kept them, and must be known again.
    return (text if not (as_rows_name_it or title) and isinstance(text, str) else whole), name
