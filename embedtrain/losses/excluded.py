"""Candidates that are no negatives of a row: itself, and what equals an answer to its query.

The host lists them before the step, since it knows the rows of all ranks; the loss only sets their scores.

N, K: queries and documents of all ranks; M: documents of this rank; c, t: rows and candidates of one tile; E: excluded
cells, that is, pairs of a row and a candidate; A: different pairs of a query and a document that answers it, which are
the rows' positives and the known answers.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.losses import LossDirection
from embedtrain.distributed.collectives import gather_rows
from embedtrain.losses.types import BatchInfo, GlobalRows, Loss, Prepared
from embedtrain.utils.formatting import format_count

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
    # Documents that equal, by text or id, an answer to the row's query, and queries with such an answer; otherwise only
    # the row's own positive and, for `document_document`, its own documents.
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
    answer_groups: Tensor  # int64 [A], ascending
    answer_codes: Tensor  # int64 [A]
    own_answers: Tensor  # int64, this rank's documents that answer their row's query, by text
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
            groups=torch.from_numpy(lists.texts.groups),
            text_codes=torch.from_numpy(lists.texts.codes),
            answer_groups=torch.from_numpy(lists.texts.answer_groups),
            answer_codes=torch.from_numpy(lists.texts.answer_codes),
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
            answer_groups=change(self.answer_groups),
            answer_codes=change(self.answer_codes),
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
        relations = [(self.text_codes, self.answer_groups, self.answer_codes)] * cells.masked
        if self.id_codes is not None:
            relations.append((self.id_codes, self.groups, self.id_codes[self.positives]))
        for codes, answer_groups, answer_codes in relations:
            mask = self._mask(direction, codes, answer_groups, answer_codes, first_row, first, scores.shape)
            if direction is LossDirection.document_query:  # only `cells` exclude a row's own pair
                mask.diagonal(first_row - first).fill_(False)
            scores = scores.masked_fill_(mask, -torch.inf)
        return scores.index_put_(cells.of(start, start + len(scores)), scores.new_full((), -torch.inf))

    def own_documents(self, first_row: int, num_rows: int, first: int) -> tuple[Tensor, Tensor]:
        """The cells (row counted from `first_row`, candidate counted from `first`) of the rows' own documents."""
        cells, start = self._find(None, first_row, first)
        return cells.of(start, start + num_rows)

    def exclude_answers(self, mask: Tensor, owners: Tensor) -> None:
        """Set `mask` [M] for this rank's documents that answer their row's query, by text and id."""
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

    def _mask(
        self,
        direction: LossDirection,
        codes: Tensor,
        answer_groups: Tensor,
        answer_codes: Tensor,
        first_row: int,
        first: int,
        shape: torch.Size,
    ) -> Tensor:
        """Bool [c, t], true for duplicates. No size depends on the number of duplicates, which the host ignores."""
        by_code = direction is LossDirection.document_query
        keys, values = (answer_codes, answer_groups) if by_code else (answer_groups, answer_codes)
        rows = slice(first_row, first_row + shape[0])
        row_keys = codes[self.positives[rows]] if by_code else self.groups[rows]
        ordered = row_keys.sort()[0]
        index = torch.searchsorted(ordered, keys).clamp(max=len(ordered) - 1)
        index = torch.where(ordered[index] == keys, index, len(ordered))  # the last row of the table is unused
        size = max(len(self.groups), len(codes))
        table = torch.zeros(len(ordered) + 1, size, dtype=torch.bool, device=keys.device)
        table.index_put_((index, values), torch.ones((), dtype=torch.bool, device=keys.device))
        if direction is LossDirection.query_query:  # from answers of the row's query to all queries with one of these
            counts = torch.zeros(len(table), size, dtype=torch.int32, device=keys.device)
            table = counts.index_add_(1, answer_groups, table.index_select(1, answer_codes).int()) > 0
        candidates = self.groups if direction in QUERY_CANDIDATES else codes
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


class _Texts:
    """Numbers of the texts of a batch and of what answers what, with numpy."""

    def __init__(self, rows: GlobalRows) -> None:
        queries, groups = np.unique(rows.query_keys, return_inverse=True)
        documents, codes = np.unique(rows.document_keys, return_inverse=True)
        self.groups, self.codes = groups.astype(np.int64), codes.astype(np.int64)  # [N], [K]
        self.num_documents = len(documents)  # different ones
        self.span = max(len(queries), len(documents), 1)
        has_document = rows.num_documents > 0
        answers = [self.groups[has_document] * self.span + self.codes[rows.first_documents[has_document]]]
        if len(rows.known_answers):
            of_query, answer = rows.known_answers.T
            # A loss that compares parts of documents has other texts.
            in_batch = np.isin(of_query, queries) & np.isin(answer, documents)
            group, code = np.searchsorted(queries, of_query[in_batch]), np.searchsorted(documents, answer[in_batch])
            answers.append(group * self.span + code)
        self.answers = np.unique(np.concatenate(answers))  # [A], group * span + code
        self.answer_groups, self.answer_codes = self.answers // self.span, self.answers % self.span

    def is_answer(self, groups: NDArray[np.int64], codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether these documents answer these queries."""
        return np.isin(groups * self.span + codes, self.answers)


class _Lists:
    """Lists the excluded cells of a batch with numpy."""

    def __init__(self, exclusion: Exclusion, rows: GlobalRows) -> None:
        self.exclusion, self.rows, self.texts = exclusion, rows, _Texts(rows)

    def own_answers(self) -> NDArray[np.int64]:
        """This rank's documents that answer their row's query; none if the loss does not ask."""
        compares_own = not self.exclusion.directions or self.exclusion.own_answers
        if not (self.exclusion.duplicates and compares_own):
            return np.empty(0, dtype=np.int64)
        local, texts = slice(self.rows.local_documents.start, self.rows.local_documents.stop), self.texts
        owners = np.repeat(texts.groups, self.rows.num_documents)[local]
        return np.flatnonzero(texts.is_answer(owners, texts.codes[local]))

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
                cells[kind, None] = self._cells(kind, range(len(self.texts.groups)), first, width)
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
        """Row -> key -> values -> candidates with that value; None if there are too many."""
        texts, by_code = self.texts, direction is LossDirection.document_query
        keys = texts.codes[self.rows.first_documents] if by_code else texts.groups
        answer_keys, answer_values = self._answers_by_code if by_code else (texts.answer_groups, texts.answer_codes)
        limit = int(len(rows) * min(MAX_LISTED * width, MAX_LISTED_PER_ROW)) + len(rows)
        starts, counts = _occurrences(answer_keys, keys[rows.start : rows.stop])
        if counts.sum() > limit:
            return None
        position, index = _expand(starts, counts)
        candidates, values = np.arange(width), (texts.groups if by_code else texts.codes)[first : first + width]
        if direction is LossDirection.query_query:  # a query is a candidate once for each of its answers
            starts, counts = _occurrences(texts.answer_groups, texts.groups[first : first + width])
            if counts.sum() > limit + width:
                return None
            candidates, values = _expand(starts, counts)
            values = texts.answer_codes[values]
        order = np.argsort(values, kind="stable")
        starts, counts = _occurrences(values[order], answer_values[index])
        if counts.sum() > limit:
            return None
        pair, index = _expand(starts, counts)
        row, column = position[pair], candidates[order[index]]
        if by_code:  # a row's own pair is no duplicate of itself
            other = row + rows.start != column + first
            row, column = row[other], column[other]
        return row, column

    @cached_property
    def _answers_by_code(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The codes of all answers, ascending, and their groups."""
        order = np.argsort(self.texts.answer_codes, kind="stable")
        return self.texts.answer_codes[order], self.texts.answer_groups[order]


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
    if not exclusion.duplicates:
        return bool(exclusion.directions and len(rows.document_keys) > 1) or bool((rows.num_documents > 1).any())
    texts = _Texts(rows)
    if exclusion.directions:
        return bool((np.unique(texts.answer_groups, return_counts=True)[1] < texts.num_documents).any())
    return not texts.is_answer(np.repeat(texts.groups, rows.num_documents), texts.codes).all()


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
