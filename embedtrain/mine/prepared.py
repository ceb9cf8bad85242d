"""What mining needs to know of all rows at once: the pool, what answers which question, how documents are seen.

T documents as often as they stand somewhere, N distinct ones, R rows of a source.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.data.cache.cache import mapped, read_metadata, write_array, write_metadata
from embedtrain.data.cache.row_store import ArrowRows
from embedtrain.data.keys import asked, text_keys
from embedtrain.data.sources.parts import Part
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.mine.documents import DocumentBatch, ProgressCallback, all_documents
from embedtrain.mine.named import DocumentIdCollector
from embedtrain.mine.pool import DocumentPool, number_documents, stripped_keys, write_pool
from embedtrain.mine.relation import Multimap, joined, positions_within, write_multimap
from embedtrain.mine.sources import DocumentFormat, MiningSource

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class MiningInputs:
    """All that was made of the rows, mapped into memory.

    Attributes:
        pool: the distinct documents.
        answers: question (key of `asked`) -> documents that are positives of a row that asks it, of any source.
        not_negatives: query (key of `stripped_keys`, without instruction) -> documents that are positives of rows with
            this query, all that equal one of them by id or but for blanks, and the query itself. An instruction may
            turn a wrong document into an answer; one too many that is left out does no harm, a wrong negative does.
        wordings: the ways in which documents are seen.
        format_of: for each source, int64 [R], which of `wordings` a row's documents have.
        ids: for each source the ids of documents, by their numbers; None where it has none.
    """

    pool: DocumentPool
    answers: Multimap
    not_negatives: Multimap
    wordings: Sequence[DocumentFormat]
    format_of: Sequence[IntArray]
    ids: Sequence["SourceDocumentIds | None"]

    @classmethod
    def open(cls, directory: Path) -> "MiningInputs":
        """What `prepare` wrote."""
        facts = read_metadata(directory / "facts.json")
        return cls(
            pool=DocumentPool(directory),
            answers=Multimap(directory, "answers"),
            not_negatives=Multimap(directory, "no-negatives"),
            wordings=[DocumentFormat(*wording) for wording in facts["wordings"]],
            format_of=[mapped(directory / f"wording-{i}.bin", np.int64) for i in range(len(facts["has_ids"]))],
            ids=[
                SourceDocumentIds(directory / f"ids-{i}.arrow") if has else None
                for i, has in enumerate(facts["has_ids"])
            ],
        )

    @property
    def notes(self) -> list[str]:
        """Lines for the user."""
        notes = [f"{len(self.pool):,} distinct documents to find negatives among"]
        if len(self.wordings) > 1:
            notes.append(
                f"they are encoded {len(self.wordings)} times, once for each prompt, instruction or length that rows "
                "see them with"
            )
        return notes


class SourceDocumentIds:
    """What a source calls documents."""

    def __init__(self, path: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._numbers = table.column("number").to_numpy()
        self._ids = table.column("id")

    def of(self, number: int) -> str:
        """The id of a document; "" where the source has none for it."""
        at = int(self._numbers.searchsorted(number))
        found = at < len(self._numbers) and self._numbers[at] == number
        return str(self._ids[at].as_py()) if found else ""


def prepare(
    directory: Path, sources: Sequence[MiningSource], corpus: Sequence[Part], world: World, progress: ProgressCallback
) -> MiningInputs:
    """Collect documents and questions, as far as that has not been done before. A collective.

    Args:
        directory: where they are kept, seen by all ranks.
        sources: what is mined.
        corpus: what is searched besides.
        world: the ranks.
        progress: called with what is done, how far it has come, and of how much.

    Raises:
        DataError: a document that cannot be read, or a row that cannot be written as it is.
    """
    with world.fail_together("collecting documents"):
        if world.is_main and not directory.is_dir():
            _prepare(directory, sources, corpus, progress)
    with world.fail_together("opening what was collected"):
        return MiningInputs.open(directory)


def _prepare(
    directory: Path, sources: Sequence[MiningSource], corpus: Sequence[Part], progress: ProgressCallback
) -> None:
    unfinished = directory.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)

    def documents() -> Iterator[DocumentBatch]:
        return all_documents(sources, corpus, progress)

    wordings: dict[DocumentFormat, int] = {}
    questions = [_questions(source, wordings) for source in sources]
    for number, (_, _, format_of) in enumerate(questions):
        write_array(unfinished / f"wording-{number}.bin", format_of)
    named = DocumentIdCollector()
    numbers, first = number_documents(named.seen(documents()))
    write_pool(unfinished, documents(), first)
    owners, places = _positives(sources)
    write_multimap(unfinished, "answers", _joint(keys for keys, _, _ in questions)[owners], numbers[places])
    named.write(unfinished, numbers)
    queries = _joint(keys for _, keys, _ in questions)
    write_multimap(
        unfinished, "no-negatives", *_no_negatives(queries, owners, places, numbers, named, DocumentPool(unfinished))
    )
    facts = {
        "wordings": [[one.before, one.after, one.max_length] for one in wordings],
        "has_ids": [(unfinished / f"ids-{number}.arrow").is_file() for number in range(len(sources))],
    }
    write_metadata(unfinished / "facts.json", facts)
    unfinished.rename(directory)


def _no_negatives(
    queries: IntArray,
    owners: IntArray,
    places: IntArray,
    numbers: IntArray,
    named: DocumentIdCollector,
    pool: DocumentPool,
) -> tuple[IntArray, IntArray]:
    """Pairs of a query's key and a document that is no negative of it.

    Args:
        queries: of each row, without blanks and instruction.
        owners: of each positive, the row.
        places: of each positive, which of the T documents it is.
        numbers: int64 [T], which distinct document each is.
        named: those that have ids.
        pool: the distinct documents.
    """
    asked_by, with_id, id_keys = queries[owners], named.places(), named.keys()
    has_id = np.isin(places, with_id)
    of_positive = id_keys[np.searchsorted(with_id, places[has_id])]
    by_id = joined(asked_by[has_id], of_positive, id_keys, numbers[with_id])
    keys, answers = np.concatenate([asked_by, by_id[0]]), np.concatenate([numbers[places], by_id[1]])
    distinct = np.unique(queries)
    bare = np.concatenate([pool.stripped_keys[answers], distinct])
    return joined(np.concatenate([keys, distinct]), bare, pool.stripped_keys, np.arange(len(pool)))


def _questions(source: MiningSource, wordings: dict[DocumentFormat, int]) -> tuple[IntArray, IntArray, IntArray]:
    """Of each row the keys of what it asks, with its instruction and bare, and which wording its documents have.

    New wordings are added to `wordings`.
    """
    store = source.store
    assert isinstance(store.rows, ArrowRows)
    keys: list[IntArray] = []
    bare: list[IntArray] = []
    format_of: list[int] = []
    for place in range(len(store.rows.batch_starts) - 1):
        batch = store.rows.batch(place)
        queries, instructions, of_documents = (
            batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows
            for name in ("query", "instruction", "document_instruction")
        )
        keys.append(text_keys([asked(*each) for each in zip(queries, instructions, strict=True)]).numpy())
        bare.append(stripped_keys(map(str, queries)))
        for own, of_document in zip(instructions, of_documents, strict=True):
            if of_document is not None and own is None:
                row = store[len(format_of)]
                raise DataError(
                    f"{row.file}:{row.line}: its documents have an instruction and its query has none, which the "
                    'rows that are written cannot say: give the query one ("" for none)'
                )
            wording = source.wording(of_document)
            format_of.append(wordings.setdefault(wording, len(wordings)))
    return _joint(keys), _joint(bare), np.array(format_of, dtype=np.int64)


def _positives(sources: Sequence[MiningSource]) -> tuple[IntArray, IntArray]:
    """Of each positive which row of all has it, and which of the T documents it is; both ascending."""
    owners: list[IntArray] = []
    places: list[IntArray] = []
    start = first_row = 0
    for source in sources:
        positives, negatives = (
            counts.astype(np.int64) for counts in (source.store.num_positives, source.store.num_negatives)
        )
        both = positives + negatives
        begins = start + np.cumsum(both) - both
        owners.append(first_row + np.repeat(np.arange(len(positives)), positives))
        places.append(np.repeat(begins, positives) + positions_within(positives))
        start += int(both.sum())
        first_row += len(positives)
    return _joint(owners), _joint(places)


def _joint(parts: Iterable[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
