"""What mining needs to know of all rows at once: the pool, what answers which question, how documents are seen.

T documents as often as they stand somewhere, N distinct ones, R rows of a source.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedtrain.data.cache.cache import mapped, read_facts, write_array, write_facts
from embedtrain.data.cache.row_table import ArrowRows
from embedtrain.data.keys import asked, text_keys
from embedtrain.data.sources.kinds import Part
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.mine.documents import Documents, Told, all_documents
from embedtrain.mine.named import Named
from embedtrain.mine.pool import Pool, bare_keys, number_documents, write_pool
from embedtrain.mine.relation import Relation, joined, numbered, write_relation
from embedtrain.mine.sources import MinedSource, Wording

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Prepared:
    """All that was made of the rows, mapped into memory.

    Attributes:
        pool: the distinct documents.
        answers: question (key of `asked`) -> documents that are positives of a row that asks it, of any source.
        no_negatives: query (key of `bare_keys`, whatever its instruction) -> documents that are positives of a row with
            this query, all that equal one of them by id or but for blanks, and the query itself. An instruction may
            turn a wrong document into an answer; one too many that is left out does no harm, a wrong negative does.
        wordings: the ways in which documents are seen.
        wording_of: for each source, int64 [R], which of `wordings` a row's documents have.
        ids: for each source the ids of documents, by their numbers; None where it has none.
    """

    pool: Pool
    answers: Relation
    no_negatives: Relation
    wordings: Sequence[Wording]
    wording_of: Sequence[Whole]
    ids: Sequence["DocumentIds | None"]

    @classmethod
    def open(cls, directory: Path) -> "Prepared":
        """What `prepare` wrote."""
        facts = read_facts(directory / "facts.json")
        return cls(
            pool=Pool(directory),
            answers=Relation(directory, "answers"),
            no_negatives=Relation(directory, "no-negatives"),
            wordings=[Wording(*wording) for wording in facts["wordings"]],
            wording_of=[mapped(directory / f"wording-{i}.bin", np.int64) for i in range(len(facts["has_ids"]))],
            ids=[DocumentIds(directory / f"ids-{i}.arrow") if has else None for i, has in enumerate(facts["has_ids"])],
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


class DocumentIds:
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
    directory: Path, sources: Sequence[MinedSource], corpus: Sequence[Part], world: World, told: Told
) -> Prepared:
    """Collect documents and questions, as far as that has not been done before. A collective.

    Args:
        directory: where they are kept, seen by all ranks.
        sources: what is mined.
        corpus: what is searched besides.
        world: the ranks.
        told: called with what is done, how far it has come, and of how much.

    Raises:
        DataError: a document that cannot be read, or a row that cannot be written as it is.
    """
    with world.together("collecting documents"):
        if world.is_main and not directory.is_dir():
            _prepare(directory, sources, corpus, told)
    with world.together("opening what was collected"):
        return Prepared.open(directory)


def _prepare(directory: Path, sources: Sequence[MinedSource], corpus: Sequence[Part], told: Told) -> None:
    unfinished = directory.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)

    def documents() -> Iterator[Documents]:
        return all_documents(sources, corpus, told)

    wordings: dict[Wording, int] = {}
    questions = [_questions(source, wordings) for source in sources]
    for number, (_, _, wording_of) in enumerate(questions):
        write_array(unfinished / f"wording-{number}.bin", wording_of)
    named = Named()
    numbers, first = number_documents(named.seen(documents()))
    write_pool(unfinished, documents(), first)
    owners, places = _positives(sources)
    write_relation(unfinished, "answers", _joint(keys for keys, _, _ in questions)[owners], numbers[places])
    named.write(unfinished, numbers)
    queries = _joint(keys for _, keys, _ in questions)
    write_relation(
        unfinished, "no-negatives", *_no_negatives(queries, owners, places, numbers, named, Pool(unfinished))
    )
    facts = {
        "wordings": [[one.before, one.after, one.max_length] for one in wordings],
        "has_ids": [(unfinished / f"ids-{number}.arrow").is_file() for number in range(len(sources))],
    }
    write_facts(unfinished / "facts.json", facts)
    os.replace(unfinished, directory)


def _no_negatives(
    queries: Whole, owners: Whole, places: Whole, numbers: Whole, named: Named, pool: Pool
) -> tuple[Whole, Whole]:
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
    bare = np.concatenate([pool.bare_keys[answers], distinct])
    return joined(np.concatenate([keys, distinct]), bare, pool.bare_keys, np.arange(len(pool)))


def _questions(source: MinedSource, wordings: dict[Wording, int]) -> tuple[Whole, Whole, Whole]:
    """Of each row the keys of what it asks, with its instruction and bare, and which wording its documents have.

    New wordings are added to `wordings`.
    """
    store = source.store
    assert isinstance(store.rows, ArrowRows)
    keys: list[Whole] = []
    bare: list[Whole] = []
    wording_of: list[int] = []
    for place in range(len(store.rows.batch_starts) - 1):
        batch = store.rows.batch(place)
        queries, instructions, of_documents = (
            batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows
            for name in ("query", "instruction", "document_instruction")
        )
        keys.append(text_keys([asked(*each) for each in zip(queries, instructions, strict=True)]).numpy())
        bare.append(bare_keys(map(str, queries)))
        for own, of_document in zip(instructions, of_documents, strict=True):
            if of_document is not None and own is None:
                row = store[len(wording_of)]
                raise DataError(
                    f"{row.file}:{row.line}: its documents have an instruction and its query has none, which the "
                    'rows that are written cannot say: give the query one ("" for none)'
                )
            wording = source.wording(of_document)
            wording_of.append(wordings.setdefault(wording, len(wordings)))
    return _joint(keys), _joint(bare), np.array(wording_of, dtype=np.int64)


def _positives(sources: Sequence[MinedSource]) -> tuple[Whole, Whole]:
    """Of each positive which row of all has it, and which of the T documents it is; both ascending."""
    owners: list[Whole] = []
    places: list[Whole] = []
    start = first_row = 0
    for source in sources:
        positives, negatives = (
            counts.astype(np.int64) for counts in (source.store.num_positives, source.store.num_negatives)
        )
        both = positives + negatives
        begins = start + np.cumsum(both) - both
        owners.append(first_row + np.repeat(np.arange(len(positives)), positives))
        places.append(np.repeat(begins, positives) + numbered(positives))
        start += int(both.sum())
        first_row += len(positives)
    return _joint(owners), _joint(places)


def _joint(parts: Iterable[Whole]) -> Whole:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
