"""The documents that negatives are found among, one after the other: those of rows, of their corpora, and more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.row_table import ArrowRows, RowStore
from embedtrain.data.sources import values
from embedtrain.data.sources.files import raw_rows
from embedtrain.data.sources.kinds import Part
from embedtrain.data.sources.pieces import PartReader
from embedtrain.data.sources.problems import BadRow
from embedtrain.data.sources.sources import resolve_parts
from embedtrain.errors import DataError
from embedtrain.mine.sources import MiningSource
from embedtrain.models.hub import split_revision

ProgressCallback = Callable[[str, int, int], None]
_TEXTS = ("text", "contents", "passage", "document_text")
_IDS = ("docid", "_id", "id", "doc_id", "document_id", "pid")
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
    return [PartReader(TrainSource(path=part.name)).digests(part) for part in parts]


def _of_rows(store: RowStore, number: int) -> Iterator[tuple[int, DocumentBatch]]:
    assert isinstance(store.rows, ArrowRows)
    has_ids = bool({"positive_ids", "negative_ids"} & store.beside)
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
    for line, row in raw_rows(part, subset=None, split="train", columns=None):
        try:
            if isinstance(row, BadRow):
                raise row
            text, name = _document(row, as_rows_name_it=source != NO_SOURCE)
        except BadRow as bad:
            raise DataError(f"{part.location(line)}: {bad}") from None
        if text.strip():
            texts.append(text)
            ids.append(name)
        if len(texts) == _AT_ONCE:
            progress(f"collecting documents of {part.name}", line, line)
            yield DocumentBatch(texts, ids, source)
            texts, ids = [], []
    yield DocumentBatch(texts, ids, source)


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
