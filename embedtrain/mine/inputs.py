"""What mining needs to know of all rows at once: the document pool, the answers of each query, the document formats.

T is the number of documents with duplicates, N of distinct ones, R of a source's rows.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedtrain.data.cache.cache import mapped, read_metadata, write_array, write_metadata
from embedtrain.data.cache.row_store import ArrowRows
from embedtrain.data.keys import instructed_query, text_keys
from embedtrain.data.sources.parts import Part
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.inference.encode import ProgressCallback
from embedtrain.mine.multimap import IntArray, Multimap, join_pairs, positions_within, write_multimap
from embedtrain.mine.pool import (
    DocumentIdCollector,
    DocumentPool,
    SourceDocumentIds,
    number_documents,
    stripped_keys,
    write_pool,
)
from embedtrain.mine.sources import DocumentBatch, DocumentFormat, MiningSource, all_documents


@dataclass(frozen=True)
class MiningInputs:
    """Everything derived from the rows before mining, memory-mapped.

    Attributes:
        pool: the distinct documents.
        answers: key of query and instruction (`instructed_query`) -> positives of the rows with both, of any source.
        not_negatives: key of the query alone (`stripped_keys`) -> positives of the rows with this query, all documents
            that have the id of one of them or equal one up to whitespace, and the query itself. Instructions are
            ignored, since another instruction can make a document relevant: a candidate too few does no harm, a false
            negative does.
        formats: the distinct document formats.
        format_of: for each source, int64 [R], the index in `formats` for the documents of each row.
        ids: for each source, the ids of its documents; None if it has none.
    """

    pool: DocumentPool
    answers: Multimap
    not_negatives: Multimap
    formats: Sequence[DocumentFormat]
    format_of: Sequence[IntArray]
    ids: Sequence[SourceDocumentIds | None]

    @classmethod
    def open(cls, directory: Path) -> "MiningInputs":
        """Open what `prepare_inputs` wrote."""
        metadata = read_metadata(directory / "facts.json")
        has_ids = metadata["has_ids"]
        return cls(
            pool=DocumentPool(directory),
            answers=Multimap(directory, "answers"),
            not_negatives=Multimap(directory, "no-negatives"),
            formats=[DocumentFormat(*fields) for fields in metadata["wordings"]],
            format_of=[mapped(directory / f"wording-{i}.bin", np.int64) for i in range(len(has_ids))],
            ids=[SourceDocumentIds(directory / f"ids-{i}.arrow") if has else None for i, has in enumerate(has_ids)],
        )

    @property
    def notes(self) -> list[str]:
        """Lines for the user."""
        notes = [f"{len(self.pool):,} distinct documents to find negatives among"]
        if len(self.formats) > 1:
            notes.append(
                f"documents are encoded {len(self.formats)} times, once for each prompt, instruction and maximum length"
            )
        return notes


def prepare_inputs(
    directory: Path, sources: Sequence[MiningSource], corpus: Sequence[Part], world: World, progress: ProgressCallback
) -> MiningInputs:
    """Collect documents and queries, unless an earlier run has done so. A collective.

    Args:
        directory: for the result, on a file system that all ranks share.
        sources: to mine.
        corpus: further documents to search.
        world: rank 0 does the work.
        progress: called while documents are collected.

    Raises:
        DataError: a document cannot be read, or a row cannot be written in the output format.
    """
    with world.fail_together("collecting documents"):
        if world.is_main and not directory.is_dir():
            _write_inputs(directory, sources, corpus, progress)
    with world.fail_together("opening the collected documents"):
        return MiningInputs.open(directory)


def _write_inputs(
    directory: Path, sources: Sequence[MiningSource], corpus: Sequence[Part], progress: ProgressCallback
) -> None:
    unfinished = directory.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)

    def documents() -> Iterator[DocumentBatch]:
        return all_documents(sources, corpus, progress)

    formats: dict[DocumentFormat, int] = {}
    row_keys = [_read_row_keys(source, formats) for source in sources]
    for number, (_, _, format_of) in enumerate(row_keys):
        write_array(unfinished / f"wording-{number}.bin", format_of)
    ids = DocumentIdCollector()
    numbers, first = number_documents(ids.collect(documents()))
    write_pool(unfinished, documents(), first)
    ids.write(unfinished, numbers)
    rows, occurrences = _locate_positives(sources)
    positives = numbers[occurrences]
    write_multimap(unfinished, "answers", _concatenate(keys for keys, _, _ in row_keys)[rows], positives)
    queries = _concatenate(keys for _, keys, _ in row_keys)
    same_id = _documents_with_same_id(queries[rows], occurrences, numbers, ids)
    excluded = np.concatenate([queries[rows], same_id[0]]), np.concatenate([positives, same_id[1]])
    write_multimap(unfinished, "no-negatives", *_extend_by_text(*excluded, queries, DocumentPool(unfinished)))
    metadata = {
        "wordings": [[each.before, each.after, each.max_length] for each in formats],
        "has_ids": [(unfinished / f"ids-{number}.arrow").is_file() for number in range(len(sources))],
    }
    write_metadata(unfinished / "facts.json", metadata)
    unfinished.rename(directory)


def _documents_with_same_id(
    queries: IntArray, occurrences: IntArray, numbers: IntArray, ids: DocumentIdCollector
) -> tuple[IntArray, IntArray]:
    """Pairs (query key, document number) of documents with the id of a positive.

    Args:
        queries: the query key of each positive.
        occurrences: of each positive, which of the T documents it is.
        numbers: int64 [T], the number of each document.
        ids: of the T documents.
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
        keys.append(text_keys([instructed_query(*pair) for pair in zip(queries, instructions, strict=True)]).numpy())
        stripped.append(stripped_keys(map(str, queries)))
        for query_instruction, document_instruction in zip(instructions, document_instructions, strict=True):
            if document_instruction is not None and query_instruction is None:
                row = store[len(format_of)]
                raise DataError(
                    f"{row.file}:{row.line}: the documents have an instruction and the query has none, which the "
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
