"""The documents that negatives are found among, one after the other: those of rows, of their corpora, and more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.row_store import ArrowRows, RowStore
from embedtrain.data.sources.documents import DocumentReader
from embedtrain.data.sources.part_reader import PartReader, Piece
from embedtrain.data.sources.parts import Part
from embedtrain.data.sources.resolve import resolve_parts
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import DataError
from embedtrain.mine.sources import MiningSource
from embedtrain.models.hub import split_revision

ProgressCallback = Callable[[str, int, int], None]
_AT_ONCE = 4096
NO_SOURCE = -1


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Some documents in their order.

    Attributes:
        texts: any of them may stand more than once.
        ids: of each, "" for one that has none; empty where none has.
        source: whose rows name them by these ids; NOBODY's where no row can mean them.
    """

    texts: list[str]
    ids: list[str]
    source: int


def all_documents(
    sources: Sequence[MiningSource], corpus: Sequence[Part], progress: ProgressCallback
) -> Iterator[DocumentBatch]:
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
            progress("collecting documents of rows", done, total)
    for number, source in enumerate(sources):
        for part in source.document_parts:
            yield from _of_corpus(part, number, progress)
    for part in corpus:
        yield from _of_corpus(part, NO_SOURCE, progress)


def corpus_parts(paths: Sequence[str]) -> list[Part]:
    """The files that `corpus` means: of a BEIR folder its corpus, of any other all its tables.

    Raises:
        DataError: nothing is there, or nothing that can be read.
        ConfigError: as `resolve_parts`.
    """
    parts: list[Part] = []
    for path in paths:
        own = sorted(Path(path).expanduser().glob("corpus.*")) if Path(path).expanduser().is_dir() else []
        name, revision = split_revision(path)
        parts += resolve_parts(TrainSource(path=str(own[0]) if own else name, revision=revision))
    return parts


def corpus_digests(parts: Sequence[Part]) -> list[list[str]]:
    """What the files of corpora hold.

    Raises:
        DataError: a file is gone or cannot be read.
    """
    reader = PartReader()
    return [reader.digests(part) for part in parts]


def _of_rows(store: RowStore, number: int) -> Iterator[tuple[int, DocumentBatch]]:
    assert isinstance(store.rows, ArrowRows)
    has_ids = bool({"positive_ids", "negative_ids"} & store.extra_columns)
    for location in range(len(store.rows.batch_starts) - 1):
        batch = store.rows.batch(location)
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
        yield batch.num_rows, DocumentBatch(texts, ids, number)


def _of_corpus(part: Part, source: int, progress: ProgressCallback) -> Iterator[DocumentBatch]:
    texts: list[str] = []
    ids: list[str] = []
    reader = DocumentReader([part], part.name, ids_required=False)
    for line, document in reader.documents(Piece(part)):
        if isinstance(document, BadRow):
            raise DataError(f"{part.location(line)}: {document}")
        # Spaces around a text without a title are kept, so that it equals the same text in a row.
        is_plain = source == NO_SOURCE and not document.title
        text = document.text if is_plain else document.full_text
        if text.strip():
            texts.append(text)
            ids.append(document.id)
        if len(texts) == _AT_ONCE:
            progress(f"collecting documents of {part.name}", line, line)
            yield DocumentBatch(texts, ids, source)
            texts, ids = [], []
    yield DocumentBatch(texts, ids, source)
