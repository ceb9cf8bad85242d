"""Candidates that are no negatives of a row: itself, duplicates of its positive, answers to an equal query.

The host lists them before the step, since it knows the rows of all ranks; the loss only sets their scores.

N, K: queries and documents of all ranks; M: documents of this rank; c, t: rows and candidates of one tile; E: excluded
cells, that is, pairs of a row and a candidate.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.losses import LossDirection
from embedtrain.distributed.collectives import gather_rows
from embedtrain.losses.types import BatchInfo, GlobalRows, Loss, Prepared
from embedtrain.utils.formatting import format_count

Array = TypeVar("Array", Tensor, NDArray[np.int64])

QUERY_ANCHORS = (LossDirection.query_document, LossDirection.query_query)
QUERY_CANDIDATES = (LossDirection.document_query, LossDirection.query_query)

# Duplicates are listed one by one, at 16 bytes each, up to this fraction of the candidates and this number per row;
# beyond it the tile at hand gets a mask.
MAX_LISTED = 1 / 16
MAX_LISTED_PER_ROW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Which candidates a loss excludes."""

    directions: tuple[LossDirection, ...]  # () if rows are compared with their own documents only
    # Documents that equal, by text or id, an answer to the row's query or to an equal query; otherwise only the row's
    # own positive and, for `document_document`, its own documents.
    duplicates: bool
    # `document_query` scores a row's own pair a second time, as the joint softmax of GTE (Li et al., 2023) and of
    # sentence-transformers does.
    score_positive_twice: bool = False
    hardness: bool = False  # negatives are weighted by whether they are the row's own documents
    ring: bool = False  # candidates arrive from one rank at a time
    own_answers: bool = False  # whether rows are compared with their own documents besides `directions`


@dataclass(frozen=True, slots=True)
class Cells:
    """Excluded cells of consecutive rows with consecutive candidates, both counted from the first one."""

    rows: Tensor  # int64 [E], ascending
    columns: Tensor  # int64 [E]
    ends: NDArray[np.int64]  # the number of cells up to each row, on the host
    masked: bool  # whether there are so many duplicates that they are not listed

    def of(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """The cells (row counted from `start`, candidate) of some rows."""
        first, last = (int(self.ends[row - 1]) if row else 0 for row in (start, end))
        return self.rows[first:last] - start, self.columns[first:last]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedCandidates:
    """The excluded candidates of a batch. Memory grows with N + K, and with the tile at hand."""

    local_rows: range  # this rank's, among those of all ranks
    local_documents: range
    positives: Tensor  # int64 [N], index of each row's positive among all documents
    groups: Tensor  # int64 [N] from 0, equal for equal queries
    text_codes: Tensor  # int64 [K] from 0, equal for equal texts
    own_answers: Tensor  # int64, this rank's documents that answer their row's query or an equal one, by text
    # By (direction, first candidate). Direction None: a row's own documents. First candidate None: the rows of all
    # ranks with this rank's candidates; else this rank's rows.
    cells: Mapping[tuple[LossDirection | None, int | None], Cells]
    id_codes: Tensor | None = None  # int64 [K] from 0, equal for equal ids

    @classmethod
    def build(cls, exclusion: Exclusion, rows: GlobalRows) -> "ExcludedCandidates":
        """In host memory, without communication."""
        lists = _Lists(exclusion, rows)
        return cls(
            local_rows=rows.local_rows,
            local_documents=rows.local_documents,
            positives=torch.from_numpy(rows.first_documents),
            groups=torch.from_numpy(lists.groups),
            text_codes=torch.from_numpy(lists.codes),
            own_answers=torch.from_numpy(lists.own_answers()),
            cells=lists.all_cells(),
        )

    @classmethod
    def of(cls, exclusion: Exclusion, batch_info: BatchInfo) -> "ExcludedCandidates":
        """As prepared, or else built now. A collective if the batch has ids, which only their rank knows."""
        excluded = batch_info.prepared.get(exclusion)
        device = batch_info.owners.device
        if excluded is None:
            excluded = cls.build(exclusion, batch_info.rows).map_tensors(
                lambda tensor: tensor.to(device, non_blocking=True)
            )
        assert isinstance(excluded, cls)
        if not exclusion.duplicates or batch_info.document_ids is None:
            return excluded
        return replace(
            excluded, id_codes=dense_codes(gather_rows(batch_info.document_ids, batch_info.rows.counts.documents))
        )

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "ExcludedCandidates":
        """A copy with `change` applied to all tensors."""
        return replace(
            self,
            positives=change(self.positives),
            groups=change(self.groups),
            text_codes=change(self.text_codes),
            own_answers=change(self.own_answers),
            cells={
                key: replace(cells, rows=change(cells.rows), columns=change(cells.columns))
                for key, cells in self.cells.items()
            },
        )

    def mask_scores(self, scores: Tensor, direction: LossDirection, first_row: int, first: int) -> Tensor:
        """Set scores [c, t] of excluded candidates to -inf; in place, differentiable.

        The first row and the first candidate are counted over all ranks.
        """
        if not scores.numel():
            return scores
        cells, start = self._find(direction, first_row, first)
        for codes in [self.text_codes] * cells.masked + [self.id_codes] * (self.id_codes is not None):
            assert codes is not None
            mask = self._mask(direction, codes, first_row, first, scores.shape)
            if direction is LossDirection.document_query:  # only `cells` exclude a row's own pair
                mask.diagonal(first_row - first).fill_(False)
            scores = scores.masked_fill_(mask, -torch.inf)
        return scores.index_put_(cells.of(start, start + len(scores)), scores.new_full((), -torch.inf))

    def own_documents(self, first_row: int, num_rows: int, first: int) -> tuple[Tensor, Tensor]:
        """The cells (row counted from `first_row`, candidate counted from `first`) of the rows' own documents."""
        cells, start = self._find(None, first_row, first)
        return cells.of(start, start + num_rows)

    def exclude_answers(self, mask: Tensor, owners: Tensor) -> None:
        """Set `mask` [M] for this rank's documents that answer their row's query, or an equal one; by text and id."""
        mask.index_fill_(0, self.own_answers, True)
        if self.id_codes is None or not len(mask):
            return
        local_codes = self.id_codes[self.local_documents.start : self.local_documents.stop]
        span = len(self.id_codes)
        answers = (self.groups * span + self.id_codes[self.positives]).sort()[0]
        pairs = self.groups[owners + self.local_rows.start] * span + local_codes
        mask |= answers[torch.searchsorted(answers, pairs).clamp(max=len(answers) - 1)] == pairs

    def _find(self, kind: LossDirection | None, first_row: int, first: int) -> tuple[Cells, int]:
        """The cells that include this row and candidate, and the row counted from their first one."""
        if first_row in self.local_rows:
            return self.cells[kind, first], first_row - self.local_rows.start
        return self.cells[kind, None], first_row

    def _mask(self, direction: LossDirection, codes: Tensor, first_row: int, first: int, shape: torch.Size) -> Tensor:
        """Bool [c, t], true for duplicates. No size depends on the number of duplicates, which the host ignores."""
        keys, values, candidates = _relation(direction, self.groups, codes, codes[self.positives])
        row_keys = keys[first_row : first_row + shape[0]]
        ordered = row_keys.sort()[0]
        index = torch.searchsorted(ordered, keys).clamp(max=len(ordered) - 1)
        index = torch.where(ordered[index] == keys, index, len(ordered))  # the last row of the table is unused
        table = torch.zeros(len(ordered) + 1, max(len(keys), len(codes)), dtype=torch.bool, device=keys.device)
        table.index_put_((index, values), torch.ones((), dtype=torch.bool, device=keys.device))
        table = table.index_select(1, candidates[first : first + shape[1]])
        return table.index_select(0, torch.searchsorted(ordered, row_keys))


class ExcludingLoss(Loss):
    """A loss over the candidates of a batch, some of which it excludes."""

    @abstractmethod
    def exclusion(self, rows: GlobalRows, width: int, dtype: torch.dtype) -> Exclusion:
        """What is excluded of candidates that have rows of this width."""

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """The excluded candidates."""
        exclusion = self.exclusion(batch_info.rows, dimension, torch.float32)
        if exclusion in batch_info.prepared:
            return {}
        return {exclusion: ExcludedCandidates.build(exclusion, batch_info.rows)}


class _Lists:
    """Lists the excluded cells of a batch with numpy."""

    def __init__(self, exclusion: Exclusion, rows: GlobalRows) -> None:
        self.exclusion, self.rows = exclusion, rows
        self.groups, self.codes = (
            np.unique(keys, return_inverse=True)[1].astype(np.int64) for keys in (rows.query_keys, rows.document_keys)
        )
        self._pairs = cache(self._unique_pairs)

    def own_answers(self) -> NDArray[np.int64]:
        """This rank's documents that answer their row's query or an equal one; none if the loss does not ask."""
        compares_own = not self.exclusion.directions or self.exclusion.own_answers
        if not (self.exclusion.duplicates and compares_own):
            return np.empty(0, dtype=np.int64)
        span, local = len(self.codes), slice(self.rows.local_documents.start, self.rows.local_documents.stop)
        owners = np.repeat(np.arange(len(self.groups)), self.rows.num_documents)[local]
        answers = self.groups * span + self.codes[self.rows.first_documents]
        return np.flatnonzero(np.isin(self.groups[owners] * span + self.codes[local], answers))

    def all_cells(self) -> dict[tuple[LossDirection | None, int | None], Cells]:
        """As in `ExcludedCandidates`."""
        kinds: list[LossDirection | None] = [*self.exclusion.directions]
        if self.exclusion.hardness:
            kinds.append(None)
        cells: dict[tuple[LossDirection | None, int | None], Cells] = {}
        for kind in kinds:
            counts = self.rows.counts.queries if kind in QUERY_CANDIDATES else self.rows.counts.documents
            for first, width in _blocks(counts) if self.exclusion.ring else [(0, sum(counts))]:
                cells[kind, first] = self._cells(kind, self.rows.local_rows, first, width)
            if self.exclusion.ring:
                first, width = _blocks(counts)[self.rows.rank]
                cells[kind, None] = self._cells(kind, range(len(self.groups)), first, width)
        return cells

    def _cells(self, kind: LossDirection | None, rows: range, first: int, width: int) -> Cells:
        """Of these rows with candidates from `first` on."""
        cells, listed = [self._own_cells(kind, rows, first, width)], None
        if kind is not None and self.exclusion.duplicates:
            listed = self._duplicates(kind, rows, first, width)
            if listed is not None:
                cells.append(listed)
        row, column = (np.concatenate(parts) for parts in zip(*cells, strict=True))
        order = np.argsort(row, kind="stable")
        return Cells(
            torch.from_numpy(row[order]),
            torch.from_numpy(column[order]),
            np.cumsum(np.bincount(row, minlength=len(rows))),
            masked=listed is None and kind is not None and self.exclusion.duplicates,
        )

    def _own_cells(
        self, kind: LossDirection | None, rows: range, first: int, width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        numbers = np.arange(rows.start, rows.stop)
        position, local = np.arange(len(rows)), slice(rows.start, rows.stop)
        match kind:
            case LossDirection.query_document:
                column = self.rows.first_documents[local]
            case LossDirection.document_query if self.exclusion.score_positive_twice:
                position = column = numbers[:0]
            case LossDirection.document_query | LossDirection.query_query:
                column = numbers
            case _:
                position, column = _expand(self.rows.first_documents[local], self.rows.num_documents[local])
        inside = (column >= first) & (column < first + width)
        return position[inside], column[inside] - first

    def _duplicates(
        self, direction: LossDirection, rows: range, first: int, width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Row -> key -> values -> candidates with that code; None if there are too many."""
        keys, _, candidates = self._relation(direction)
        pair_keys, pair_values = self._pairs(direction)
        limit = int(len(rows) * min(MAX_LISTED * width, MAX_LISTED_PER_ROW)) + len(rows)
        starts, counts = _occurrences(pair_keys, keys[rows.start : rows.stop])
        if counts.sum() > limit:
            return None
        position, index = _expand(starts, counts)
        order = np.argsort(candidates[first : first + width], kind="stable")
        starts, counts = _occurrences(candidates[first : first + width][order], pair_values[index])
        if counts.sum() > limit:
            return None
        pair, index = _expand(starts, counts)
        row, column = position[pair], order[index]
        if direction is LossDirection.document_query:  # a row's own pair is no duplicate of itself
            other = row + rows.start != column + first
            row, column = row[other], column[other]
        return row, column

    def _relation(self, direction: LossDirection) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        return _relation(direction, self.groups, self.codes, self.codes[self.rows.first_documents])

    def _unique_pairs(self, direction: LossDirection) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The different pairs of a row's key and value, ascending."""
        keys, values, _ = self._relation(direction)
        span = max(len(self.groups), len(self.codes), 1)
        pairs = np.unique(keys * span + values)
        return pairs // span, pairs % span


def no_negatives_warning(prepared: Iterable[Hashable], rows: GlobalRows) -> str | None:
    """A warning if a loss compares queries with negatives and no query of the batch has one; None otherwise.

    `prepared` are the keys of what losses have prepared for the batch. Documents are compared by text, not by id.
    """
    exclusions = [key for key in prepared if isinstance(key, Exclusion)]
    if not exclusions or any(_has_negative(exclusion, rows) for exclusion in exclusions):
        return None
    num_documents = len(np.unique(rows.document_keys))
    return (
        f"no query of this batch has a negative ({format_count(len(rows.query_keys), 'row')}, "
        f"{format_count(num_documents, 'different document')}): the loss learns nothing from it; add rows or hard "
        "negatives, or increase train.global_batch_size"
    )


def _has_negative(exclusion: Exclusion, rows: GlobalRows) -> bool:
    """Whether any query has a document that is not excluded: of the batch, or of its own ones without directions."""
    has_documents = rows.num_documents > 0
    firsts, queries = rows.first_documents[has_documents], rows.query_keys[has_documents]
    if not exclusion.duplicates:
        return bool(exclusion.directions and len(rows.document_keys) > 1) or bool((rows.num_documents > 1).any())
    answers = np.unique(np.stack([queries, rows.document_keys[firsts]]), axis=1)  # of each different query
    if exclusion.directions:
        num_answers = np.unique(answers[0], return_counts=True)[1]
        return bool((num_answers < len(np.unique(rows.document_keys))).any())
    own = np.unique(np.stack([np.repeat(rows.query_keys, rows.num_documents), rows.document_keys]), axis=1)
    return bool(own.shape[1] > answers.shape[1])


def _relation(
    direction: LossDirection, groups: Array, codes: Array, positive_codes: Array
) -> tuple[Array, Array, Array]:
    """Keys [N] and values [N] of the rows, and codes of the candidates.

    A candidate duplicates an answer to row i if its code is the value of any row that has the key of row i.
    """
    match direction:
        case LossDirection.document_query:
            return positive_codes, groups, groups
        case LossDirection.query_query:
            return groups, positive_codes, positive_codes
        case _:
            return groups, positive_codes, codes


def _blocks(counts: list[int]) -> list[tuple[int, int]]:
    """The first row of each rank, and how many it has."""
    return [(sum(counts[:rank]), count) for rank, count in enumerate(counts)]


def _occurrences(ordered: NDArray[np.int64], values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each value starts in an ascending array, and how often it occurs."""
    starts = np.searchsorted(ordered, values)
    return starts, np.searchsorted(ordered, values, side="right") - starts


def _expand(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The index of each range, `counts[i]` times, and the numbers of the ranges from `starts[i]` on."""
    indices = np.repeat(np.arange(len(counts)), counts)
    return indices, np.arange(len(indices)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def dense_codes(keys: Tensor) -> Tensor:
    """Numbers from 0 that are equal where keys are. Not `unique`, whose size the host would have to wait for."""
    ordered, order = keys.sort()
    is_new = torch.zeros_like(ordered)
    is_new[1:] = (ordered[1:] != ordered[:-1]).long()
    return torch.empty_like(keys).scatter_(0, order, is_new.cumsum(0))
