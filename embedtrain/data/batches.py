"""Training data as the loop uses it: global batch k, its positives and hard negatives drawn, prompts put before."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

from embedtrain.config.needs import Needs
from embedtrain.config.schema import OnError, TrainSource
from embedtrain.data.layouts import TEXTS_ALONE
from embedtrain.data.order import BatchPlan
from embedtrain.data.readers import read_sources
from embedtrain.data.table import ExampleTable
from embedtrain.data.types import Example, GlobalBatch, Row

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Drawing:
    """How rows of one source become rows of a batch."""

    query_prompt: str
    document_prompt: str
    negatives: int | None  # hard negatives used at a time; None: all

    def row(self, example: Example, key: str) -> Row:
        """One positive and at most `negatives` hard negatives of `example`, drawn as `key` says, with prompts.

        A row with fewer negatives has fewer documents: none is repeated and nothing is padded, since a
        negative given twice would weigh twice in the loss.
        """
        positive, kept = self._places(example, key)

        def drawn(of_positives: Sequence[T], of_negatives: Sequence[T]) -> tuple[T, ...]:
            return (of_positives[positive], *[of_negatives[i] for i in kept]) if of_positives else ()

        documents = drawn(example.positives, example.negatives)
        vectors = example.vectors * (1 + len(documents))  # where one stands for all texts
        if len(example.vectors) > 1:
            first_negative = 1 + len(example.positives)
            vectors = example.vectors[:1] + drawn(example.vectors[1:first_negative], example.vectors[first_negative:])
        return Row(
            self.query_prompt + example.query,
            tuple(self.document_prompt + text for text in documents),
            scores=drawn(example.positive_scores, example.negative_scores),
            ids=drawn(*_all_ids(example)),
            label=example.label,
            vectors=vectors,
            prompt_lengths=(len(self.query_prompt), len(self.document_prompt)),
        )

    def _places(self, example: Example, key: str) -> tuple[int, Sequence[int]]:
        """Which positive, and which negatives in which order."""
        positives, negatives = example.positives, example.negatives
        most = len(negatives) if self.negatives is None else self.negatives
        positive, kept = 0, range(len(negatives))
        if len(positives) > 1 or len(negatives) > most:
            # Seeded with a text, and only `random()` used: both are kept over Python's versions.
            draw = random.Random(key)
            positive = int(draw.random() * len(positives))
            if len(negatives) > most:
                places = [draw.random() for _ in negatives]
                return positive, sorted(range(len(places)), key=places.__getitem__)[:most]
        return positive, kept


def _all_ids(example: Example) -> tuple[Sequence[str], Sequence[str]]:
    positives, negatives = example.positive_ids, example.negative_ids
    if not positives and not negatives:
        return (), ()
    return positives or [""] * len(example.positives), negatives or [""] * len(example.negatives)


class TrainData:
    """All training rows and the order they are seen in.

    Args:
        table: the rows of all sources.
        plan: the global order.
        drawings: for each source, what a batch takes of its rows.
        notes: lines for the user about what was found.
    """

    def __init__(self, table: ExampleTable, plan: BatchPlan, drawings: Sequence[Drawing], notes: list[str]) -> None:
        self.table = table
        self.plan = plan
        self.drawings = list(drawings)
        self.notes = notes

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, k: int) -> GlobalBatch:
        """Global batch k, counted from 0: the same on every rank, whatever was asked for before.

        Its rows are made when they are asked for: a rank pays for its share alone.
        """
        return GlobalBatch(k, BatchRows(self, k))

    @property
    def teacher_dimension(self) -> int | None:
        """How many dimensions the teacher's vectors have that rows hold; None where they hold none."""
        vectors = self.table[0].vectors
        return len(vectors[0]) if vectors else None

    def texts(self) -> Iterator[str]:
        """All queries and documents without prompts, for training a vocabulary."""
        return self.table.texts()


class BatchRows(Sequence[Row]):
    """The rows of global batch k, each made when it is asked for."""

    def __init__(self, data: TrainData, k: int) -> None:
        self._data = data
        self._indices = data.plan.indices(k)
        self._first = k * data.plan.global_batch_size

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, place: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(place, slice):
            return tuple(self._row(i) for i in range(len(self))[place])
        return self._row(range(len(self))[place])

    def _row(self, place: int) -> Row:
        example = self._data.table[int(self._indices[place])]
        # The key is the row's place in the run, not its number: a row seen twice in an epoch draws twice.
        return self._data.drawings[example.source].row(example, f"{self._data.plan.seed}/{self._first + place}")


def load_train_data(
    sources: Sequence[TrainSource],
    *,
    on_error: OnError = OnError.stop,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    seed: int,
    global_batch_size: int,
    needs: Needs = TEXTS_ALONE,
) -> TrainData:
    """Read all sources of `data.train`, check every row, and plan the batches.

    Args:
        sources: `data.train`.
        on_error: stop at the first bad row, or skip bad rows and say so in the notes.
        query_prompt: the model's, for sources that name none of their own.
        document_prompt: the model's, likewise.
        seed: the run's seed: rows, positives and negatives are drawn with it.
        global_batch_size: rows of a step over all ranks.
        needs: what the loss asks of every row; default: a query and a positive.

    Raises:
        DataError: a row or file that cannot be used; the text names file and line.
        ConfigError: options of a source, or the batch size, that cannot work, or not with this loss.
    """
    table, reports = read_sources(sources, on_error, needs)
    plan = BatchPlan(table.source_sizes, [source.weight for source in sources], global_batch_size, seed)
    drawings = [
        Drawing(
            query_prompt=_first_given(source.query_prompt, query_prompt),
            document_prompt=_first_given(source.document_prompt, document_prompt),
            negatives=source.negatives,
        )
        for source in sources
    ]
    notes = [str(report) for report in reports]
    notes.append(
        f"an epoch: {plan.rows_per_epoch:,} rows in {plan.steps_per_epoch:,} steps of {plan.global_batch_size:,}"
    )
    return TrainData(table, plan, drawings, notes)


def _first_given(*prompts: str | None) -> str:
    return next((prompt for prompt in prompts if prompt is not None), "")
