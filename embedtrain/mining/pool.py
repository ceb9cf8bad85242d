"""The sources of rows, and the distinct documents that negatives are chosen from: on disk and memory-mapped.

T is the number of documents with duplicates, N of distinct ones (numbered in the order of their first occurrence), I of
documents with an id.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.config.columns import DataPath
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache, map_array, write_array
from embedtrain.data.cache.document_store import MappedTexts, know_pictures
from embedtrain.data.cache.row_store import ArrowRows, RowStore, read_sources
from embedtrain.data.images.item import without_answers
from embedtrain.data.rows import Example, TextFormat, text_keys
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.part_reader import PartPiece, PartReader, require_image_columns
from embedtrain.data.sources.parts import SourcePart
from embedtrain.data.sources.reader import DocumentReader
from embedtrain.data.sources.resolve import (
    NO_IN_BATCH_NEGATIVES,
    expand_sources,
    find_parts,
    no_in_batch_negatives,
    resolve_parts,
    source_names,
)
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import DataError
from embedtrain.formats.hub import split_revision
from embedtrain.inference.encode import ProgressCallback
from embedtrain.mining.options import RowSearchOptions
from embedtrain.utils.files import expand_user

_BATCH_SIZE = 4096
NO_SOURCE = -1


@dataclass(frozen=True, order=True, slots=True)
class DocumentFormat:
    """The text around a document, and the number of its tokens that are kept (None: the model's maximum)."""

    before: str
    after: str
    max_length: int | None

    def __call__(self, text: str) -> str:
        """The document as the model sees it."""
        return f"{self.before}{text}{self.after}"


@dataclass(frozen=True, kw_only=True)
class MiningSource:
    """The rows of one source and the options that hold for all of them."""

    name: str  # of the source, and of the file that is written for it
    store: RowStore
    document_parts: Sequence[SourcePart]  # the corpus that its rows refer to by id, if any; all of it is searched
    text_format: TextFormat

    def format_query(self, row: Example) -> tuple[str, str]:
        """A row's query as the model sees it, and the prompt that it starts with."""
        prompt = self.text_format.query(row.instruction)
        return prompt(row.query), prompt.prefix

    def document_format(self, instruction: str | None) -> DocumentFormat:
        """The format of the documents of rows with this document instruction."""
        prompt = self.text_format.document(instruction)
        return DocumentFormat(prompt.prefix, prompt.suffix, self.text_format.document_max_length)

    def identity(self) -> dict[str, Any]:
        """Everything about this source that the mined rows depend on, as JSON."""
        # A picture may be replaced in a file that the rows only name.
        pictures = {"content": self.store.content} if self.store.report.num_pictures else {}
        return {"rows": self.store.key, **pictures, **asdict(self.text_format)}


def read_mining_sources(options: RowSearchOptions, prompts: Mapping[str, str], cache: Cache) -> list[MiningSource]:
    """Read and check every row of every source.

    Of `prompts`, the model's, `query` and `document` are used. Raises DataError for a row that cannot be used, with its
    file and line, and ConfigError for options of a source that contradict each other.
    """
    # The number of negatives that a training step draws does not matter here, and would only be reported.
    try:
        sources = [replace(source, negatives=None) for source in expand_sources(options.data)]
    except DataError as error:
        raise _suggest_split(error, options.data) from error.__cause__
    stores = read_sources(sources, OnError.stop, TEXTS_ONLY, cache)
    cache.verification.wait()

    default = TextFormat(
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
        instruction_format=options.instruction_format,
    )
    return [
        MiningSource(
            name=name,
            store=store,
            document_parts=find_parts(source).document_parts,
            text_format=TextFormat.of(source, default),
        )
        for name, source, store in zip(_unique_names(sources), sources, stores, strict=True)
    ]


def _suggest_split(error: DataError, sources: Sequence[TrainSource]) -> DataError:
    """The error, with the option to write if a BEIR folder only lacks the split `train`."""
    other_split = re.search(r"holds no judgements of split=\S+, only of (\w+)", str(error))
    path = next((source.path for source in sources if str(error).startswith(f"{source.path}: ")), None)
    if other_split is None or path is None:
        return error
    return DataError(f"{error}; write data=[{{path: {path}, split: {other_split[1]}}}]")


def _unique_names(sources: Sequence[TrainSource]) -> list[str]:
    """A distinct name for each source, with a suffix if its rows may not be used as in-batch negatives.

    Training reads that suffix from the path, and the mined files do not lie in the folder that had it. A name is that
    of a file, so it has no `/`.
    """
    names = [name.replace("/", "-") for name in source_names(sources)]
    named = [
        replace(source, name=f"{name}-{NO_IN_BATCH_NEGATIVES}")
        if not name.endswith(NO_IN_BATCH_NEGATIVES)
        and (no_in_batch_negatives(source) if source.in_batch_negatives is None else not source.in_batch_negatives)
        else replace(source, name=name)
        for name, source in zip(names, sources, strict=True)
    ]
    return source_names(named)


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Documents in the order in which they are read."""

    texts: list[str]  # may contain duplicates
    ids: list[str]  # one per text, "" for none; an empty list if no document has one
    source: int  # number of the source whose rows refer to documents by these ids; NO_SOURCE if none does
    groups: Sequence[str] = ()  # one per text, "" for none; empty if no document has one


def all_documents(
    sources: Sequence[MiningSource],
    corpus: Sequence[SourcePart],
    progress: ProgressCallback,
    group_column: str | None = None,
) -> Iterator[DocumentBatch]:
    """The documents of all rows (positives before negatives), then of the sources' corpora, then of `corpus`.

    Blank documents of corpora are skipped: no row may contain one. Documents of corpora with an equal value of
    `group_column` are of one group.
    """
    total = sum(len(source.store) for source in sources)
    done = 0
    for number, source in enumerate(sources):
        for num_rows, documents in _row_documents(source.store, number):
            yield documents
            done += num_rows
            progress("collecting documents of rows", done, total)
    for number, source in enumerate(sources):
        for part in source.document_parts:
            yield from _corpus_documents(part, number, progress, group_column)
    for part in corpus:
        yield from _corpus_documents(part, NO_SOURCE, progress, group_column)


def know_corpus_pictures(corpus: Sequence[SourcePart], cache: Cache) -> None:
    """Make the pictures of `corpus` known to this process; those of sources are, since their rows are read."""
    know_pictures([DocumentReader([part], part.name, ids_required=False) for part in corpus], cache)


def corpus_parts(corpus: Sequence[DataPath]) -> list[SourcePart]:
    """The files that the option `corpus` refers to: the corpus of a BEIR folder, all tables of any other folder."""
    parts: list[SourcePart] = []
    for each in corpus:
        folder = expand_user(each.path)
        corpus_files = sorted(folder.glob("corpus.*")) if folder.is_dir() else []
        name, revision = split_revision(each.path)
        source = TrainSource(path=str(corpus_files[0]) if corpus_files else name, revision=revision)
        of_each = [part.with_pictures(each) for part in resolve_parts(source, every_split=True)]
        require_image_columns(PartReader(), of_each)
        parts += of_each
    return parts


def _row_documents(store: RowStore, source: int) -> Iterator[tuple[int, DocumentBatch]]:
    assert isinstance(store.rows, ArrowRows)
    has_ids = bool({"positive_ids", "negative_ids"} & store.extra_columns)
    for batch_index in range(len(store.rows.batch_starts) - 1):
        batch = store.rows.batch(batch_index)
        missing: list[Any] = [None] * batch.num_rows
        columns = (
            batch.column(name).to_pylist() if name in batch.schema.names else missing
            for name in ("positives", "negatives", "positive_ids", "negative_ids")
        )
        texts: list[str] = []
        ids: list[str] = []
        for positives, negatives, positive_ids, negative_ids in zip(*columns, strict=True):
            texts += map(without_answers, positives)
            texts += map(without_answers, negatives)
            if has_ids:
                ids += positive_ids or [""] * len(positives)
                ids += negative_ids or [""] * len(negatives)
        yield batch.num_rows, DocumentBatch(texts, ids, source)


def _corpus_documents(
    part: SourcePart, source: int, progress: ProgressCallback, group_column: str | None
) -> Iterator[DocumentBatch]:
    texts: list[str] = []
    ids: list[str] = []
    groups: list[str] = []
    reader = DocumentReader([part], part.name, ids_required=False, group_column=group_column)
    for line, document in reader.documents(PartPiece(part)):
        if isinstance(document, BadRow):
            raise DataError(f"{part.location(line)}: {document}")
        # Whitespace around a text without a title is kept, so that it equals the same text in a row.
        is_text = source == NO_SOURCE and not document.title and not document.pictures
        text = document.text if is_text else document.full_text
        if text.strip():
            texts.append(text)
            ids.append(document.id)
            groups.append(document.group)
        if len(texts) == _BATCH_SIZE:
            progress(f"collecting documents of {part.name}", line, line)
            yield DocumentBatch(texts, ids, source, groups)
            texts, ids, groups = [], [], []
    yield DocumentBatch(texts, ids, source, groups)


IntArray = NDArray[np.int64]
_DOCUMENTS_PER_BATCH = 1024
_SCHEMA = pa.schema([("text", pa.large_string())])


class DocumentPool(Sequence[str]):
    """Texts by document number, and document numbers by text key; reads what `write_pool` wrote."""

    def __init__(self, directory: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(directory / "documents.arrow"))).read_all()
        self._texts = MappedTexts(table["text"])
        self.keys = map_array(directory / "keys.bin", np.int64)  # [N], `text_keys` of the documents
        self.stripped_keys = map_array(
            directory / "stripped_keys.bin", np.int64
        )  # [N], `stripped_keys` of the documents
        self._order = map_array(directory / "order.bin", np.int64)
        self._sorted = map_array(directory / "sorted.bin", np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: Any) -> Any:  # an int: nothing here needs slices
        return self._texts[number]

    def numbers(self, keys: IntArray) -> IntArray:
        """The document number of each key, -1 for an unknown key: int64 [n]."""
        at = np.minimum(self._sorted.searchsorted(keys), max(0, len(self) - 1))
        return np.where(self._sorted[at] == keys, self._order[at], -1)

    def formatted(self, document_format: Callable[[str], str], documents: IntArray | None = None) -> Sequence[str]:
        """All texts, or those of these documents, as the model sees them, formatted on access."""
        return _FormattedTexts(self, document_format, documents)


class _FormattedTexts(Sequence[str]):
    def __init__(self, pool: DocumentPool, document_format: Callable[[str], str], documents: IntArray | None) -> None:
        self._pool, self._format, self._documents = pool, document_format, documents

    def __len__(self) -> int:
        return len(self._pool if self._documents is None else self._documents)

    def __getitem__(self, number: Any) -> Any:
        return self._format(self._pool[number if self._documents is None else int(self._documents[number])])


def stripped_keys(texts: Iterable[str]) -> IntArray:
    """Keys, int64 [n], that are equal for texts that differ in leading and trailing whitespace only."""
    return text_keys([text.strip() for text in texts])


def number_documents(batches: Iterable[DocumentBatch]) -> tuple[IntArray, IntArray]:
    """Number distinct texts in the order of their first occurrence.

    Returns the number of each document, int64 [T], and the index of the first occurrence of each number, int64 [N].
    """
    keys = np.concatenate([np.empty(0, dtype=np.int64), *(text_keys(batch.texts) for batch in batches)])
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


def write_pool(directory: Path, batches: Iterable[DocumentBatch], first: IntArray) -> None:
    """Write the distinct texts to an existing, empty directory.

    `batches` are those that `number_documents` read, in a second pass; `first`, int64 [N], is from there.
    """
    keys: list[IntArray] = [np.empty(0, dtype=np.int64)]
    stripped: list[IntArray] = [np.empty(0, dtype=np.int64)]
    with pa.OSFile(str(directory / "documents.arrow"), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        remaining = _first_occurrences(batches, first)
        while texts := list(itertools.islice(remaining, _DOCUMENTS_PER_BATCH)):
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(texts, pa.large_string())], schema=_SCHEMA))
            keys.append(text_keys(texts))
            stripped.append(stripped_keys(texts))
    all_keys = np.concatenate(keys)
    order = np.argsort(all_keys, kind="stable")
    write_array(directory / "keys.bin", all_keys)
    write_array(directory / "stripped_keys.bin", np.concatenate(stripped))
    write_array(directory / "order.bin", order)
    write_array(directory / "sorted.bin", all_keys[order])


def _first_occurrences(batches: Iterable[DocumentBatch], first: IntArray) -> Iterator[str]:
    start = 0
    for batch in batches:
        left, right = np.searchsorted(first, [start, start + len(batch.texts)])
        yield from (batch.texts[index - start] for index in first[left:right].tolist())
        start += len(batch.texts)


class DocumentIdCollector:
    """Collects the ids of documents while they are read.

    As Arrow arrays: millions of Python strings and integers would take ten times the memory.
    """

    def __init__(self) -> None:
        self._indices: list[IntArray] = [np.empty(0, dtype=np.int64)]
        self._keys: list[IntArray] = [np.empty(0, dtype=np.int64)]
        self._ids_by_source: dict[int, list[pa.Array]] = {}
        self._indices_by_source: dict[int, list[IntArray]] = {}

    def collect(self, batches: Iterator[DocumentBatch]) -> Iterator[DocumentBatch]:
        """Pass the documents on, and record their ids."""
        start = 0
        for batch in batches:
            if batch.source != NO_SOURCE:
                self._record(batch, start)
            start += len(batch.texts)
            yield batch

    def _record(self, batch: DocumentBatch, start: int) -> None:
        with_id = [index for index, document_id in enumerate(batch.ids) if document_id]
        if not with_id:
            return
        ids = [batch.ids[index] for index in with_id]
        indices: IntArray = start + np.array(with_id, dtype=np.int64)
        self._indices.append(indices)
        # Ids are local to a source: "7" of another source is another document.
        self._keys.append(text_keys([f"{batch.source} {document_id}" for document_id in ids]))
        self._ids_by_source.setdefault(batch.source, []).append(pa.array(ids, pa.large_string()))
        self._indices_by_source.setdefault(batch.source, []).append(indices)

    def indices(self) -> IntArray:
        """Which of the T documents have an id, ascending: int64 [I]."""
        return np.concatenate(self._indices)

    def keys(self) -> IntArray:
        """The key of each document's source and id: int64 [I]."""
        return np.concatenate(self._keys)

    def write(self, directory: Path, numbers: IntArray) -> None:
        """Write, for each source with ids, the first id of each distinct document; `numbers` is int64 [T]."""
        for source, ids in self._ids_by_source.items():
            distinct, first = np.unique(numbers[np.concatenate(self._indices_by_source[source])], return_index=True)
            table = pa.table({"number": distinct, "id": pa.chunked_array(ids).take(pa.array(first))})
            path = str(directory / f"ids-{source}.arrow")
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


class GroupCollector:
    """Collects the groups of documents while they are read."""

    def __init__(self) -> None:
        self._indices: list[IntArray] = [np.empty(0, dtype=np.int64)]
        self._keys: list[IntArray] = [np.empty(0, dtype=np.int64)]

    def collect(self, batches: Iterator[DocumentBatch]) -> Iterator[DocumentBatch]:
        """Pass the documents on, and record their groups."""
        start = 0
        for batch in batches:
            with_group = [index for index, group in enumerate(batch.groups) if group]
            self._indices.append(start + np.array(with_group, dtype=np.int64))
            self._keys.append(text_keys([batch.groups[index] for index in with_group]))
            start += len(batch.texts)
            yield batch

    def members(self) -> tuple[IntArray, IntArray]:
        """Which of the T documents have a group, ascending, and the key of the group of each: int64 [G] both."""
        return np.concatenate(self._indices), np.concatenate(self._keys)


class SourceDocumentIds:
    """The ids that one source has for documents of the pool."""

    def __init__(self, path: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._numbers = table.column("number").to_numpy()
        self._ids = table.column("id")

    def get(self, number: int) -> str:
        """The id of a document, "" for a document without one."""
        at = int(self._numbers.searchsorted(number))
        has_id = at < len(self._numbers) and self._numbers[at] == number
        return str(self._ids[at].as_py()) if has_id else ""
