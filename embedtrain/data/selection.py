"""What a batch takes of its rows: one positive and some negatives of each, and documents of other rows.

B: rows of a batch; T: texts of a batch, all queries and then all documents, row by row, each row's positive first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.cache.token_store import TokenStore, gather_ranges
from embedtrain.data.sampling.batch_negatives import BatchDocuments, BatchNegatives
from embedtrain.data.sampling.draw import Selection
from embedtrain.data.sampling.plan import PlannedBatch
from embedtrain.data.text_format import TextFormat, text_keys
from embedtrain.data.types import BatchTokens, Example, Row

T = TypeVar("T")

# Extra columns of rows that losses use.
ID_COLUMNS = frozenset({"positive_ids", "negative_ids"})
LOSS_COLUMNS = ID_COLUMNS | {"positive_scores", "negative_scores", "label", "vectors"}


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of all rows of a source."""

    text_format: TextFormat
    negatives: int | None = None  # hard negatives of a row that one step uses; None: all
    lists: bool = False  # whether a step uses other positives of a row like its negatives
    batch_negatives: int = 0  # documents of other rows that each row gets as further negatives

    def row(self, example: Example, positive: int, negatives: Sequence[int]) -> Row:
        """The query of `example` with one positive and some hard negatives, by their indices as in `Selection`.

        A row with fewer negatives has fewer documents: a repeated negative would count twice in the loss.
        """

        def select(of_positives: Sequence[T], of_negatives: Sequence[T]) -> tuple[T, ...]:
            of_all, first = (*of_positives, *of_negatives), len(of_positives)
            return (of_positives[positive], *[of_all[first + i] for i in negatives]) if of_positives else ()

        documents = select(example.positives, example.negatives)
        vectors = example.vectors * (1 + len(documents))  # if one stands for all texts
        if len(example.vectors) > 1:
            first_negative = 1 + len(example.positives)
            vectors = example.vectors[:1] + select(example.vectors[1:first_negative], example.vectors[first_negative:])
        return Row(
            example.query,
            documents,
            scores=select(example.positive_scores, example.negative_scores),
            ids=select(*_all_ids(example)),
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
    """The rows of a global batch, each read when it is accessed."""

    def __init__(
        self,
        stores: Sequence[RowStore],
        settings: Sequence[SourceSettings],
        planned: PlannedBatch,
        selection: Selection,
    ) -> None:
        self._stores, self._settings, self._planned, self._selection = stores, settings, planned, selection
        self._negative_starts = np.cumsum(selection.counts) - selection.counts

    def __len__(self) -> int:
        return len(self._planned.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self._row(i) for i in range(len(self))[index])
        return self._row(range(len(self))[index])

    def id_keys(self) -> NDArray[np.int64]:
        """Hashes of the ids of all documents that the rows hold, row by row, -1 without an id. Reads every row.

        Ids are compared within a source: "7" of another source is another document.
        """
        ids: list[str] = []
        for index, source in enumerate(self._planned.sources.tolist()):
            example = self._example(index)
            names = [name for of_kind in _all_ids(example) for name in of_kind]
            ids += [name and f"{source} {name}" for name in names] or [""] * (
                len(example.positives) + len(example.negatives)
            )
        return np.where([bool(name) for name in ids], text_keys(ids).numpy(), -1)

    def _example(self, index: int) -> Example:
        return self._stores[int(self._planned.sources[index])][int(self._planned.rows[index])]

    def _row(self, index: int) -> Row:
        source = int(self._planned.sources[index])
        start, count = self._negative_starts[index], self._selection.counts[index]
        return self._settings[source].row(
            self._example(index),
            int(self._selection.positive[index]),
            self._selection.negatives[start : start + count].tolist(),
        )


class SelectedTokens:
    """The tokens of a global batch from the stores of its sources: implements BatchTokens.

    `num_positives` are those of each row: int64 [B].
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        planned: PlannedBatch,
        selection: Selection,
        num_positives: NDArray[np.int64],
    ) -> None:
        self._stores, self._planned = stores, planned
        query_texts = np.empty(len(planned.rows), dtype=np.int64)  # of each row, the index of its query in the store
        for source in np.unique(planned.sources):
            of_source = planned.sources == source
            query_texts[of_source] = stores[source].row_starts[planned.rows[of_source]]
        self.num_documents = (selection.positive >= 0) + selection.counts
        self._texts = np.concatenate([query_texts, _document_texts(query_texts, num_positives, selection)])
        self._sources = np.concatenate([planned.sources, np.repeat(planned.sources, self.num_documents)])
        self.lengths, self.keys = (np.empty(len(self._texts), dtype=np.int64) for _ in range(2))
        for source in np.unique(planned.sources):
            of_source = self._sources == source
            self.lengths[of_source] = stores[source].lengths(self._texts[of_source])
            self.keys[of_source] = stores[source].keys[self._texts[of_source]]

    def documents(self, ids: NDArray[np.int64] | None) -> BatchDocuments:
        """The documents that the rows hold; `ids` are those of `SelectedRows.id_keys`, None if no row has any."""
        num_rows = len(self.num_documents)
        queries, counts = self._texts[:num_rows], np.empty(num_rows, dtype=np.int64)
        for source in np.unique(self._planned.sources):
            of_source = self._planned.sources == source
            counts[of_source] = self._stores[source].row_starts[self._planned.rows[of_source] + 1]
        counts -= queries + 1
        first = np.cumsum(counts) - counts  # of each row among the documents that all rows hold
        keys = np.empty(int(counts.sum()), dtype=np.int64)
        owners = np.repeat(self._planned.sources, counts)
        for source in np.unique(self._planned.sources):
            of_source = self._planned.sources == source
            keys[owners == source] = gather_ranges(self._stores[source].keys, queries[of_source] + 1, counts[of_source])
        rows = np.repeat(np.arange(num_rows), self.num_documents)
        used = first[rows] + self._texts[num_rows:] - queries[rows] - 1
        return BatchDocuments(query_keys=self.keys[:num_rows], keys=keys, ids=ids, counts=counts, used=used)

    def ids(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The concatenated tokens of these texts."""
        sources = np.unique(self._sources[texts])
        if len(sources) == 1:
            return self._stores[int(sources[0])].ids(self._texts[texts])
        lengths = self.lengths[texts]
        owners = np.repeat(self._sources[texts], lengths)
        token_ids: NDArray[np.int32] = np.empty(int(lengths.sum()), dtype=np.int32)
        for source in sources:
            token_ids[owners == source] = self._stores[int(source)].ids(
                self._texts[texts[self._sources[texts] == source]]
            )
        return token_ids


def _document_texts(
    query_texts: NDArray[np.int64], num_positives: NDArray[np.int64], selection: Selection
) -> NDArray[np.int64]:
    """The indices of all selected documents in the stores: of each row its positive, then its negatives.

    A row with 2 positives and 3 negatives whose query is text 10 of its store has positives 11 and 12 and negatives 13,
    14 and 15. If positive 1 and negatives 0 and 2 are selected, its documents are 12, 13 and 15.
    """
    has_positive = selection.positive >= 0
    num_documents = has_positive + selection.counts
    row_starts = np.cumsum(num_documents) - num_documents  # of each row in the result
    documents = np.empty(int(num_documents.sum()), dtype=np.int64)
    documents[row_starts[has_positive]] = (query_texts + 1 + selection.positive)[has_positive]
    first_negatives = query_texts + 1 + num_positives
    negative_starts = np.cumsum(selection.counts) - selection.counts
    index_in_row = np.arange(len(selection.negatives)) - negative_starts[selection.owners]
    negatives = first_negatives[selection.owners] + selection.negatives
    documents[(row_starts + has_positive)[selection.owners] + index_in_row] = negatives
    return documents


class ExtendedTokens:
    """The tokens of a batch whose rows also have documents of other rows, after their own: implements BatchTokens."""

    def __init__(self, tokens: BatchTokens, negatives: BatchNegatives) -> None:
        self._tokens = tokens
        num_rows, own = len(tokens.num_documents), len(tokens.keys) - len(tokens.num_documents)
        self.num_documents = tokens.num_documents + negatives.counts
        owners = np.concatenate(
            [np.repeat(np.arange(num_rows), counts) for counts in (tokens.num_documents, negatives.counts)]
        )
        documents = np.concatenate([np.arange(own), negatives.documents])[np.argsort(owners, kind="stable")]
        self._texts = np.concatenate([np.arange(num_rows), num_rows + documents])
        self.lengths, self.keys = tokens.lengths[self._texts], tokens.keys[self._texts]

    def ids(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The concatenated tokens of these texts."""
        return self._tokens.ids(self._texts[texts])
