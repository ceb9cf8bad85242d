"""The documents of retrieval sets: small corpora as lists, large ones mapped from the cache on disk."""

from collections.abc import Mapping
from typing import Any

from embedtrain.data.cache.cache import Cache
from embedtrain.data.sources.kinds import PartKind
from embedtrain.data.sources.streams import size_of
from embedtrain.data.sources.tables import open_dataset
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.corpus_store import stored_corpus
from embedtrain.evaluation.readers.rows import Table, id_field, no_progress_bars, text_field
from embedtrain.evaluation.types import Corpus

ID = ("_id", "id")
# Corpora of fewer bytes are held by every process; a packed file has a few times as many in it.
MAPPED_BYTES = 1 << 26
_PACKED = 3


def read_documents(table: Table, cache: Cache) -> Corpus:
    """Documents of rows with an id, a text and perhaps a title, in the order of the table.

    An id may stand there twice with the same text; it is one document.

    Args:
        table: the corpus.
        cache: where a large one is kept.

    Raises:
        DataError: a row cannot be used, an id stands for two texts, or there is none.
    """
    if _num_bytes(table) >= MAPPED_BYTES:
        return stored_corpus(table, document_of, cache)
    texts: dict[str, str] = {}
    for where, fields in table.rows():
        key, text = document_of(fields, where)
        if texts.setdefault(key, text) != text:
            raise DataError(f"{where}: the id {key} stands for another text before")
    if not texts:
        raise DataError(f"{table.name} is empty")
    return Corpus.of(texts)


def document_of(fields: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The id of a document and its text, the title before it, as BEIR and mteb put them together.

    Raises:
        DataError: one is missing, or is no text.
    """
    key, text = id_field(fields, ID, where), text_field(fields, ("text",), where)
    if fields.get("title") is not None:
        text = text_field(fields, ("title",), where) + " " + text
    return key, text.strip()


def _num_bytes(table: Table) -> int:
    part = table.part
    if part.kind is PartKind.hub:
        with no_progress_bars():
            return int(open_dataset(part, None, "train").data.nbytes)
    packed = part.name.lower().endswith((".gz", ".zst", ".parquet"))
    return (size_of(part.name) or 0) * (_PACKED if packed else 1)
