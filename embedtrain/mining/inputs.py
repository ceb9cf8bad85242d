"""What mining needs to know of all rows at once: the document pool, the answers of each query, the document formats.

Shapes: T documents with duplicates, N distinct documents, R rows of a source, P pairs (key, item).
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from embedtrain.data.cache.cache import map_array, read_metadata, write_array, write_metadata
from embedtrain.data.cache.row_store import ArrowRows
from embedtrain.data.rows import Example, instructed_query, text_keys
from embedtrain.data.sources.parts import SourcePart
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.inference.encode import ProgressCallback
from embedtrain.inference.index import ShardedIndex
from embedtrain.losses.encoded import Part
from embedtrain.mining.pool import (
    DocumentBatch,
    DocumentFormat,
    DocumentIdCollector,
    DocumentPool,
    GroupCollector,
    IntArray,
    MiningSource,
    SourceDocumentIds,
    all_documents,
    number_documents,
    stripped_keys,
    write_pool,
)
from embedtrain.utils.files import damaged_files, remove_tree, write_checksums


class Multimap:
    """The memory-mapped multimap that `write_multimap` wrote as `name` to `directory`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._keys, self._starts, self._items = (
            map_array(directory / f"{name}-{part}.bin", np.int64) for part in ("keys", "starts", "items")
        )

    def lookup(self, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The items of keys, as two int64 arrays: the index of a key in `keys`, and one of its items; both ascend."""
        if not len(self._keys):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
        starts = self._starts[at]
        counts = np.where(self._keys[at] == keys, self._starts[at + 1] - starts, 0)
        owners = np.repeat(np.arange(len(keys)), counts)
        return owners, self._items[starts[owners] + positions_within(counts)]


def write_multimap(directory: Path, name: str, keys: IntArray, items: IntArray) -> None:
    """Write the pairs of `keys` and `items`, int64 [P]; duplicates are written once."""
    keys, items = distinct_pairs(keys, items)
    distinct, starts = np.unique(keys, return_index=True)
    for part, values in (("keys", distinct), ("starts", np.append(starts, len(keys))), ("items", items)):
        write_array(directory / f"{name}-{part}.bin", values.astype(np.int64))


def distinct_pairs(keys: IntArray, items: IntArray) -> tuple[IntArray, IntArray]:
    """Each pair once, sorted by key, then by item."""
    order = np.lexsort((items, keys))
    keys, items = keys[order], items[order]
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = (keys[1:] != keys[:-1]) | (items[1:] != items[:-1])
    return keys[is_new], items[is_new]


def join_pairs(keys: IntArray, links: IntArray, linked: IntArray, items: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs (key, item) for which a link exists with (key, link) and (link, item) among the inputs."""
    # Without the deduplication, a pair that occurs in many rows would be joined with itself: quadratic memory.
    (keys, links), (linked, items) = distinct_pairs(keys, links), distinct_pairs(linked, items)
    starts = np.searchsorted(linked, links, side="left")
    counts = np.searchsorted(linked, links, side="right") - starts
    owners = np.repeat(np.arange(len(links)), counts)
    return keys[owners], items[starts[owners] + positions_within(counts)]


def positions_within(counts: IntArray) -> IntArray:
    """0, ..., count - 1 for each count, concatenated: int64 [sum of counts]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class MiningInputs:
    """Everything derived from the rows before mining, memory-mapped."""

    pool: DocumentPool
    answers: Multimap  # key of `instructed_query` -> positives of the rows with this query, of any source
    # Key of the query alone (`stripped_keys`) -> positives of the rows with this query, all documents that have the id
    # of one of them, are of the group of one or equal one up to whitespace, and the query itself. Instructions are
    # ignored, since another instruction can make a document relevant: a candidate too few does no harm, a false
    # negative does.
    not_negatives: Multimap
    formats: Sequence[DocumentFormat]  # distinct
    format_of: Sequence[IntArray]  # for each source, [R], the index in `formats` for the documents of each row
    ids: Sequence[SourceDocumentIds | None]  # for each source; None if its documents have no ids

    @classmethod
    def open(cls, directory: Path) -> "MiningInputs":
        """Open what `prepare_inputs` wrote."""
        metadata = read_metadata(directory / "metadata.json")
        has_ids = metadata["has_ids"]
        return cls(
            pool=DocumentPool(directory),
            answers=Multimap(directory, "answers"),
            not_negatives=Multimap(directory, "not_negatives"),
            formats=[DocumentFormat(*fields) for fields in metadata["formats"]],
            format_of=[map_array(directory / f"format_of-{i}.bin", np.int64) for i in range(len(has_ids))],
            ids=[SourceDocumentIds(directory / f"ids-{i}.arrow") if has else None for i, has in enumerate(has_ids)],
        )

    @property
    def notes(self) -> list[str]:
        """Lines for the user."""
        notes = [f"{len(self.pool):,} distinct documents to find negatives among"]
        if len(self.formats) > 1:
            times = f"{len(self.formats)} times, once for each prompt, instruction and maximum length"
            notes.append(f"documents are encoded {times}")
        return notes


def prepare_inputs(
    directory: Path,
    sources: Sequence[MiningSource],
    corpus: Sequence[SourcePart],
    world: World,
    progress: ProgressCallback,
    group_column: str | None = None,
) -> MiningInputs:
    """Collect documents and queries on rank 0, unless an earlier run has done so. A collective.

    Documents with the `group_column` of a positive are no negatives of its query. Raises DataError if a document cannot
    be read, or a row cannot be written in the output format.
    """
    damaged: list[str] = []
    with world.fail_together("verifying the collected documents"):
        if directory.is_dir():
            damaged = damaged_files(directory, world.rank, world.size)
    damaged = list(dict.fromkeys(name for names in world.gather(damaged) for name in names))
    with world.fail_together("collecting documents"):
        if world.is_main and damaged:
            more = f" and {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
            text = f"{directory / damaged[0]}{more}: damaged, so the documents are collected again"
            print(text, file=sys.stderr, flush=True)
            remove_tree(directory)
        if world.is_main and not directory.is_dir():
            _write_inputs(directory, sources, corpus, progress, group_column)
    with world.fail_together("opening the collected documents"):
        return MiningInputs.open(directory)


def _write_inputs(
    directory: Path,
    sources: Sequence[MiningSource],
    corpus: Sequence[SourcePart],
    progress: ProgressCallback,
    group_column: str | None,
) -> None:
    unfinished = directory.with_suffix(".part")
    remove_tree(unfinished)
    unfinished.mkdir(parents=True)

    def documents() -> Iterator[DocumentBatch]:
        return all_documents(sources, corpus, progress, group_column)

    formats: dict[DocumentFormat, int] = {}
    row_keys = [_read_row_keys(source, formats) for source in sources]
    for number, (_, _, format_of) in enumerate(row_keys):
        write_array(unfinished / f"format_of-{number}.bin", format_of)
    ids, groups = DocumentIdCollector(), GroupCollector()
    numbers, first = number_documents(groups.collect(ids.collect(documents())))
    grouped, group_keys = groups.members()
    if group_column is not None and not len(grouped):
        raise ConfigError(
            f"exclude_same={group_column}: no document of a corpus has a value there; write corpus=PATH, documents of "
            "which it is a column"
        )
    write_pool(unfinished, documents(), first)
    ids.write(unfinished, numbers)
    rows, occurrences = _locate_positives(sources)
    positives = numbers[occurrences]
    write_multimap(unfinished, "answers", _concatenate(keys for keys, _, _ in row_keys)[rows], positives)
    queries = _concatenate(keys for _, keys, _ in row_keys)
    same_id = _documents_with_same_id(queries[rows], occurrences, numbers, ids)
    of_group = join_pairs(queries[rows], positives, numbers[grouped], group_keys)
    same_group = join_pairs(*of_group, group_keys, numbers[grouped])
    pairs = [(queries[rows], positives), same_id, same_group]
    excluded = np.concatenate([keys for keys, _ in pairs]), np.concatenate([of for _, of in pairs])
    write_multimap(unfinished, "not_negatives", *_extend_by_text(*excluded, queries, DocumentPool(unfinished)))
    metadata = {
        "formats": [[fmt.before, fmt.after, fmt.max_length] for fmt in formats],
        "has_ids": [(unfinished / f"ids-{number}.arrow").is_file() for number in range(len(sources))],
    }
    write_metadata(unfinished / "metadata.json", metadata)
    write_checksums(unfinished)
    unfinished.rename(directory)


def _documents_with_same_id(
    queries: IntArray, occurrences: IntArray, numbers: IntArray, ids: DocumentIdCollector
) -> tuple[IntArray, IntArray]:
    """Pairs (query key, document number) of documents with the id of a positive.

    `queries` and `occurrences` have, for each positive, the query key and which of the T documents it is; `numbers` is
    int64 [T].
    """
    with_id, id_keys = ids.indices(), ids.keys()
    has_id = np.isin(occurrences, with_id)
    positive_id_keys = id_keys[np.searchsorted(with_id, occurrences[has_id])]
    return join_pairs(queries[has_id], positive_id_keys, id_keys, numbers[with_id])


def _extend_by_text(
    keys: IntArray, documents: IntArray, queries: IntArray, pool: DocumentPool
) -> tuple[IntArray, IntArray]:
    """Pairs (query key, document number) extended to all documents that equal these, or the query, up to whitespace."""
    distinct = np.unique(queries)
    texts = np.concatenate([pool.stripped_keys[documents], distinct])
    return join_pairs(np.concatenate([keys, distinct]), texts, pool.stripped_keys, np.arange(len(pool)))


def _read_row_keys(source: MiningSource, formats: dict[DocumentFormat, int]) -> tuple[IntArray, IntArray, IntArray]:
    """For each row: the key of query and instruction, the key of the stripped query, and the document format.

    New document formats are added to `formats`.
    """
    store = source.store
    assert isinstance(store.rows, ArrowRows)
    keys: list[IntArray] = []
    stripped: list[IntArray] = []
    format_of: list[int] = []
    for batch_index in range(len(store.rows.batch_starts) - 1):
        batch = store.rows.batch(batch_index)
        queries, instructions, document_instructions = (
            batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows
            for name in ("query", "instruction", "document_instruction")
        )
        keys.append(text_keys([instructed_query(*pair) for pair in zip(queries, instructions, strict=True)]))
        stripped.append(stripped_keys(map(str, queries)))
        for query_instruction, document_instruction in zip(instructions, document_instructions, strict=True):
            if document_instruction is not None and query_instruction is None:
                row = store[len(format_of)]
                raise DataError(
                    f"{row.place}: the documents have an instruction and the query has none, which the "
                    'output format cannot express: give the query one ("" for none)'
                )
            format_of.append(formats.setdefault(source.document_format(document_instruction), len(formats)))
    return _concatenate(keys), _concatenate(stripped), np.array(format_of, dtype=np.int64)


def _locate_positives(sources: Sequence[MiningSource]) -> tuple[IntArray, IntArray]:
    """For each positive of all sources: the row that has it, and which of the T documents it is; both ascend."""
    rows: list[IntArray] = []
    occurrences: list[IntArray] = []
    start = first_row = 0
    for source in sources:
        positives, negatives = (
            counts.astype(np.int64) for counts in (source.store.num_positives, source.store.num_negatives)
        )
        per_row = positives + negatives
        row_starts = start + np.cumsum(per_row) - per_row
        rows.append(first_row + np.repeat(np.arange(len(positives)), positives))
        occurrences.append(np.repeat(row_starts, positives) + positions_within(positives))
        start += int(per_row.sum())
        first_row += len(positives)
    return _concatenate(rows), _concatenate(occurrences)


def _concatenate(parts: Iterable[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one source with one document format, which are searched and written together."""

    source: int  # its number
    format: int  # number of the document format
    number: int  # of the block, from 0, among those of its source and format
    rows: IntArray  # ascending

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.source:05}-{self.format:05}-{self.number:07}"


def row_blocks(format_of: Sequence[IntArray], size: int) -> list[RowBlock]:
    """Cut the rows of all sources into blocks of at most `size`; `format_of` is that of `MiningInputs`."""
    blocks: list[RowBlock] = []
    for source, formats in enumerate(format_of):
        for document_format in np.unique(formats).tolist():
            rows = np.flatnonzero(formats == document_format)
            for number, start in enumerate(range(0, len(rows), size)):
                blocks.append(RowBlock(source, document_format, number, rows[start : start + size]))
    return blocks


FloatArray = NDArray[np.float32]
# Queries with at most this many excluded documents are searched together; those with more, in groups that double.
_SMALLEST_DEPTH = 32


@dataclass(frozen=True, slots=True)
class QueryDocumentPairs:
    """Pairs of queries and documents."""

    owners: IntArray  # [P], the query of each pair, ascending
    documents: IntArray  # [P]

    def counts(self, num_queries: int) -> IntArray:
        """The number of documents of each query: int64 [Q]."""
        return np.bincount(self.owners, minlength=num_queries).astype(np.int64)

    def slice_of(self, query: int) -> slice:
        """Where the pairs of one query are."""
        left, right = np.searchsorted(self.owners, [query, query + 1]).tolist()
        return slice(left, right)


@dataclass(frozen=True, kw_only=True)
class UniqueQueries:
    """The distinct queries of a block: rows with the same text, instruction and prompt share one."""

    of_row: IntArray  # [R], the query of each row
    texts: Sequence[str]  # of the queries, without prompt
    inputs: Sequence[str]  # of the queries, as the model sees them
    prompts: Sequence[str]  # the prompt that each input starts with
    keys: IntArray  # [Q], keys of query and instruction (`instructed_query`)
    answers: QueryDocumentPairs  # by query, the positives of all rows with this key
    excluded: QueryDocumentPairs  # by query, the documents that are never its negatives
    existing: QueryDocumentPairs  # by row, in their order, the negatives to keep, without excluded documents
    existing_pairs: QueryDocumentPairs  # the distinct pairs of `existing`, by query

    @classmethod
    def of(cls, rows: Sequence[Example], source: MiningSource, inputs: MiningInputs, *, keep_existing: bool) -> Self:
        """The queries of rows of one source."""
        number_of: dict[tuple[str, str, str], int] = {}
        texts: list[str] = []
        of_row: IntArray = np.empty(len(rows), dtype=np.int64)
        for index, row in enumerate(rows):
            identity = (instructed_query(row.query, row.instruction), *source.format_query(row))
            number = number_of.setdefault(identity, len(number_of))
            if number == len(texts):
                texts.append(row.query)
            of_row[index] = number
        keys = text_keys([key for key, _, _ in number_of])
        excluded = QueryDocumentPairs(*inputs.not_negatives.lookup(stripped_keys(texts)))
        existing = _existing_negatives(rows if keep_existing else [], of_row, excluded, inputs)
        return cls(
            of_row=of_row,
            texts=texts,
            inputs=[text for _, text, _ in number_of],
            prompts=[prompt for _, _, prompt in number_of],
            keys=keys,
            answers=QueryDocumentPairs(*inputs.answers.lookup(keys)),
            excluded=excluded,
            existing=existing,
            existing_pairs=QueryDocumentPairs(*distinct_pairs(of_row[existing.owners], existing.documents)),
        )


def _existing_negatives(
    rows: Sequence[Example], of_row: IntArray, excluded: QueryDocumentPairs, inputs: MiningInputs
) -> QueryDocumentPairs:
    owners: IntArray = np.repeat(np.arange(len(rows)), np.array([len(row.negatives) for row in rows], dtype=np.int64))
    documents = inputs.pool.numbers(text_keys([text for row in rows for text in row.negatives.texts]))
    size = len(inputs.pool)
    keep = ~np.isin(of_row[owners] * size + documents, excluded.owners * size + excluded.documents)
    # Negatives of a row that differ in surrounding whitespace only count once.
    stripped = inputs.pool.stripped_keys[documents]
    order = np.lexsort((np.arange(len(stripped)), stripped, owners))
    is_duplicate = (np.diff(owners[order]) == 0) & (np.diff(stripped[order]) == 0)
    keep[order[1:][is_duplicate]] = False
    return QueryDocumentPairs(owners[keep], documents[keep])


def scores_of(index: ShardedIndex, queries: Part, pairs: QueryDocumentPairs) -> FloatArray:
    """The score of each pair, float32 [P], bit-identical to the score in a search. A collective."""
    scores: FloatArray = np.empty(len(pairs.owners), dtype=np.float32)
    counts = pairs.counts(len(queries))
    starts = np.cumsum(counts) - counts
    for group in group_by_depth(counts):
        group_counts = counts[group]
        if not group_counts.any():
            continue
        rows, columns = np.repeat(np.arange(len(group)), group_counts), positions_within(group_counts)
        indices = np.repeat(starts[group], group_counts) + columns
        documents: IntArray = np.full((len(group), int(group_counts.max())), -1, dtype=np.int64)
        documents[rows, columns] = pairs.documents[indices]
        group_scores = index.scores_of(
            queries.take(torch.from_numpy(group), group), torch.from_numpy(documents)
        ).numpy()
        scores[indices] = group_scores[rows, columns]
    return scores


def group_by_depth(counts: IntArray) -> list[IntArray]:
    """Group queries by their number of documents, so that one with many does not make all others search as deep."""
    size = np.ceil(np.log2(np.maximum(counts, _SMALLEST_DEPTH) / _SMALLEST_DEPTH)).astype(np.int64)
    return [np.flatnonzero(size == group_size).astype(np.int64) for group_size in np.unique(size)]
