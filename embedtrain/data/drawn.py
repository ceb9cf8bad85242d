"""What one global batch takes of its rows: as Rows with texts, made when asked for, and as tokens where they are kept.

B rows; T texts: B queries, then all documents, row by row, the positive of each first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.cache.token_store import TokenStore
from embedtrain.data.sampling.draw import Selection
from embedtrain.data.sampling.plan import PlannedBatch
from embedtrain.data.text_format import TextFormat
from embedtrain.data.types import Example, Row

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """What holds for all rows of a source.

    Attributes:
        text_format: prompts and maximal lengths.
        negatives: hard negatives of a row that one step uses; None: all.
    """

    text_format: TextFormat
    negatives: int | None = None

    def row(self, example: Example, positive: int, negatives: Sequence[int]) -> Row:
        """One positive and some hard negatives of `example`, by their numbers.

        A row with fewer negatives has fewer documents: none is repeated and nothing is padded, since a
        negative given twice would weigh twice in the loss.
        """

        def drawn(of_positives: Sequence[T], of_negatives: Sequence[T]) -> tuple[T, ...]:
            return (of_positives[positive], *[of_negatives[i] for i in negatives]) if of_positives else ()

        documents = drawn(example.positives, example.negatives)
        vectors = example.vectors * (1 + len(documents))  # where one stands for all texts
        if len(example.vectors) > 1:
            first_negative = 1 + len(example.positives)
            vectors = example.vectors[:1] + drawn(example.vectors[1:first_negative], example.vectors[first_negative:])
        return Row(
            example.query,
            documents,
            scores=drawn(example.positive_scores, example.negative_scores),
            ids=drawn(*_all_ids(example)),
            label=example.label,
            vectors=vectors,
            source=example.source,
        )


def _all_ids(example: Example) -> tuple[Sequence[str], Sequence[str]]:
    positives, negatives = example.positive_ids, example.negative_ids
    if not positives and not negatives:
        return (), ()
    return positives or [""] * len(example.positives), negatives or [""] * len(example.negatives)


class SelectedRows(Sequence[Row]):
    """The rows of a global batch, each made when it is asked for."""

    def __init__(
        self, stores: Sequence[RowStore], settings: Sequence[SourceSettings], planned: PlannedBatch, drawn: Selection
    ) -> None:
        self._stores, self._settings, self._planned, self._drawn = stores, settings, planned, drawn
        self._starts = np.cumsum(drawn.counts) - drawn.counts

    def __len__(self) -> int:
        return len(self._planned.rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, place: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(place, slice):
            return tuple(self._row(i) for i in range(len(self))[place])
        return self._row(range(len(self))[place])

    def _row(self, place: int) -> Row:
        source = int(self._planned.sources[place])
        start, count = self._starts[place], self._drawn.counts[place]
        return self._settings[source].row(
            self._stores[source][int(self._planned.rows[place])],
            int(self._drawn.positive[place]),
            self._drawn.negatives[start : start + count].tolist(),
        )


class SelectedTokens:
    """The tokens of a global batch's texts; see BatchTokens.

    Args:
        stores: of each source.
        planned: the rows.
        drawn: which positive and negatives of each.
        num_positives: int64 [B], that each row has.
    """

    def __init__(
        self, stores: Sequence[TokenStore], planned: PlannedBatch, drawn: Selection, num_positives: NDArray[np.int64]
    ) -> None:
        self._stores = stores
        firsts = np.empty(len(planned.rows), dtype=np.int64)
        for source in np.unique(planned.sources):
            here = planned.sources == source
            firsts[here] = stores[source].first[planned.rows[here]]
        answered = drawn.positive >= 0
        self.num_documents = answered + drawn.counts
        # The places of documents among all documents: each row's positive, then its negatives.
        starts = np.cumsum(self.num_documents) - self.num_documents
        documents = np.empty(int(self.num_documents.sum()), dtype=np.int64)
        documents[starts[answered]] = (firsts + 1 + drawn.positive)[answered]
        within = np.arange(len(drawn.negatives)) - (np.cumsum(drawn.counts) - drawn.counts)[drawn.owners]
        documents[(starts + answered)[drawn.owners] + within] = (firsts + 1 + num_positives)[
            drawn.owners
        ] + drawn.negatives
        self._texts = np.concatenate([firsts, documents])
        self._sources = np.concatenate([planned.sources, np.repeat(planned.sources, self.num_documents)])
        self.lengths, self.keys = (np.empty(len(self._texts), dtype=np.int64) for _ in range(2))
        for source in np.unique(planned.sources):
            here = self._sources == source
            self.lengths[here] = stores[source].lengths(self._texts[here])
            self.keys[here] = stores[source].keys[self._texts[here]]

    def ids(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tokens of these texts, one after the other."""
        sources = np.unique(self._sources[texts])
        if len(sources) == 1:
            return self._stores[int(sources[0])].ids(self._texts[texts])
        lengths = self.lengths[texts]
        owners = np.repeat(self._sources[texts], lengths)
        found: NDArray[np.int32] = np.empty(int(lengths.sum()), dtype=np.int32)
        for source in sources:
            found[owners == source] = self._stores[int(source)].ids(self._texts[texts[self._sources[texts] == source]])
        return found
