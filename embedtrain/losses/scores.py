"""Scores of rows against candidates: which candidates count as negatives, and what they score.

N, K: queries and documents of all ranks; B, M: of this rank; c, t: rows and candidates of one tile; D, T: dimensions of
the model's and of the guide's vectors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from embedtrain.config.losses import Hardness, InfoNCEConfig, LossDirection, MarginKind
from embedtrain.distributed.collectives import gather_rows, row_counts
from embedtrain.losses.types import BatchInfo

QUERY_ANCHORS = (LossDirection.query_document, LossDirection.query_query)
QUERY_CANDIDATES = (LossDirection.document_query, LossDirection.query_query)

# Excluded cells are listed one by one, at 50 bytes each, up to this fraction of a tile; beyond it they become a mask.
MAX_LISTED = 1 / 16


class Counts(NamedTuple):
    """The number of queries and of documents of each rank."""

    queries: list[int]
    documents: list[int]

    @classmethod
    def gather(cls, queries: Tensor, documents: Tensor) -> "Counts":
        """Of these rows [B, ...] and [M, ...]. A collective."""
        return cls(row_counts(len(queries), queries.device), row_counts(len(documents), documents.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of the batch: one query and its positive each."""

    indices: Tensor  # int64 [c], among the queries of all ranks
    queries: Tensor  # [c, D]
    positives: Tensor  # [c, D]
    accuracy_thresholds: Tensor  # [c], a candidate that scores at least this ties or beats the positive
    score_limits: Tensor | None = None  # [c], candidates that score more are no negatives
    guide_queries: Tensor | None = None  # [c, T]
    guide_positives: Tensor | None = None  # [c, T]
    guide_limits: Tensor | None = None  # [c], candidates more similar than this to the guide are no negatives

    def slice(self, start: int, end: int) -> "Rows":
        """The rows from `start` to `end`."""
        parts = {name: None if value is None else value[start:end] for name, value in self.tensors().items()}
        return Rows(**parts)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor | None]:
        """All fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def anchors(self, direction: LossDirection) -> Tensor:
        """The vectors [c, D] that a direction compares with its candidates."""
        return self.queries if direction in QUERY_ANCHORS else self.positives

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Queries and documents that rows are compared with."""

    first_query: int  # index of the first one among those of all ranks, as `first_document`
    first_document: int
    documents: Tensor  # [t, D]
    queries: Tensor | None = None  # [t, D], if a direction uses them
    guide_queries: Tensor | None = None  # [t, T]
    guide_documents: Tensor | None = None  # [t, T]

    def of(self, direction: LossDirection) -> Tensor:
        """The candidates [t, D] of a direction."""
        vectors = self.queries if direction in QUERY_CANDIDATES else self.documents
        assert vectors is not None
        return vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRules:
    """How scores are computed before their softmax: options of InfoNCEConfig, and the batch's excluded candidates."""

    excluded: "ExcludedCandidates"
    hardness: Hardness
    hardness_strength: float

    def scores(
        self, direction: LossDirection, rows: Rows, candidates: Candidates, scale: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Similarity times `scale`, [c, t]; -inf where a candidate is no negative.

        Differentiable, except with `out`: a buffer that the scores are written to.
        """
        columns = candidates.of(direction)
        scores = torch.mm(rows.anchors(direction) * scale, columns.T, out=out)
        first = candidates.first_query if direction in QUERY_CANDIDATES else candidates.first_document
        mask = None
        if rows.score_limits is not None:
            mask = scores.detach() > rows.score_limits.unsqueeze(1)
        if rows.guide_limits is not None:
            guide_mask = self._guide_mask(direction, rows, candidates)
            mask = guide_mask if mask is None else mask.logical_or_(guide_mask)
        if mask is not None:
            if direction is LossDirection.document_query:  # the positive pair itself stays
                local = (rows.indices >= first) & (rows.indices < first + len(columns))
                mask[local.nonzero().squeeze(1), rows.indices[local] - first] = False
            scores = scores.masked_fill_(mask, -torch.inf)
        if self.hardness is not Hardness.none and direction is LossDirection.query_document:
            scores = self._add_hardness(scores, rows, candidates, float(scale.detach()))
        return self.excluded.mask_scores(scores, direction, rows.indices, first)

    def _guide_mask(self, direction: LossDirection, rows: Rows, candidates: Candidates) -> Tensor:
        """[c, t], true where the guide finds a candidate closer than the positive (Solatorio, 2024)."""
        columns = candidates.guide_queries if direction in QUERY_CANDIDATES else candidates.guide_documents
        anchors = rows.guide_queries if direction in QUERY_ANCHORS else rows.guide_positives
        assert anchors is not None
        assert columns is not None
        assert rows.guide_limits is not None
        return (anchors @ columns.T) > rows.guide_limits.unsqueeze(1)

    def _add_hardness(self, scores: Tensor, rows: Rows, candidates: Candidates, scale: float) -> Tensor:
        """Add strength * similarity, without gradient, to the scores of the negatives that `hardness` names."""
        bonus = scores.detach() * (self.hardness_strength / scale)
        own = self.excluded.own_documents(rows.indices, candidates.first_document, scores.shape[1])
        match self.hardness:
            case Hardness.in_batch:
                bonus.index_put_(own, bonus.new_zeros(()))
            case Hardness.hard:
                own_bonus = bonus[own]
                bonus = torch.zeros_like(bonus).index_put_(own, own_bonus)
        # -inf - (-inf) would be NaN; excluded candidates stay excluded.
        return scores.add_(bonus.masked_fill_(bonus == -torch.inf, 0.0))


def rounding_tolerance(like: Tensor) -> float:
    """How far two computations of the same similarity of vectors of length 1 may differ.

    Comparisons of scores leave this margin: a document whose vector equals the positive's has to be treated alike in
    every precision, by every kernel and on every rank, instead of by rounding errors.
    """
    # TF32 rounds the operands to 10 bits, so each is off by up to 2^-10 of its size.
    tf32 = like.is_cuda and like.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return 2**-9 if tf32 else 16 * torch.finfo(like.dtype).eps


def score_limits(
    queries: Tensor, positives: Tensor, scale: Tensor, config: InfoNCEConfig
) -> tuple[Tensor, Tensor | None]:
    """`accuracy_thresholds` and `score_limits` of `Rows`, from queries and positives [B, D] without gradient."""
    similarity = (queries * positives).sum(dim=1)
    tolerance = rounding_tolerance(similarity) * queries.norm(dim=1) * positives.norm(dim=1)
    margin = config.false_negative_margin
    limits = None if margin is None else (similarity + margin + tolerance) * scale
    return (similarity - config.margin - tolerance) * scale, limits


def guide_limits(positive: Tensor, config: InfoNCEConfig) -> Tensor:
    """From the guide's similarities of the positives [c]: the similarity above which it rejects a negative."""
    scale = positive.abs() if config.guide_margin_kind is MarginKind.relative else 1.0
    return positive - config.guide_margin * scale + rounding_tolerance(positive)


class ExcludedCandidates:
    """Candidates that are no negatives of a row: itself, duplicates of its positive, answers to an equal query.

    Kept as relations between small integers, never as a matrix: `mask_scores` applies them to the tile at hand. Memory
    grows with N + K, and with the tile. Every rank must construct it.

    Args:
        duplicates: whether to exclude documents that equal, by text or id, an answer to the row's query or to an equal
            query; otherwise only the row's own positive and, for `document_document`, its own documents.
        score_positive_twice: whether `document_query` scores a row's own pair a second time, as the joint softmax of
            GTE (Li et al., 2023) and of sentence-transformers does.
    """

    def __init__(self, batch_info: BatchInfo, counts: Counts, *, duplicates: bool, score_positive_twice: bool) -> None:
        self._score_positive_twice = score_positive_twice
        rank = dist.get_rank()
        self._first_document = sum(counts.documents[:rank])
        self.positives = gather_rows(batch_info.positives + self._first_document, counts.queries)  # [N]
        self._owners = gather_rows(batch_info.owners + sum(counts.queries[:rank]), counts.documents)  # [K]
        self._num_local = len(batch_info.owners)
        num_queries, num_documents = len(self.positives), len(self._owners)
        self._queries = torch.arange(num_queries, device=self._owners.device)
        self._documents = torch.arange(num_documents, device=self._owners.device)
        self._own_documents = _Multimap(self._owners, self._documents, num_queries)
        self._groups, self._codes = self._queries, list[Tensor]()
        self._relations: dict[LossDirection, list[_Relation]] = {direction: [] for direction in LossDirection}
        if not duplicates:
            return
        self._groups = gather_rows(batch_info.query_keys, counts.queries).unique(return_inverse=True)[1]
        keys = [batch_info.document_keys]
        # Whether any rank has ids is agreed on: a collective that only some ranks run would hang.
        if any(row_counts(0 if batch_info.document_ids is None else 1, self._owners.device)):
            keys.append(batch_info.document_keys if batch_info.document_ids is None else batch_info.document_ids)
        for document_keys in keys:
            self._relate(gather_rows(document_keys, counts.documents).unique(return_inverse=True)[1])

    def _relate(self, codes: Tensor) -> None:
        """Add the relations between groups of equal queries and codes [K] of equal documents."""
        self._codes.append(codes)
        num_codes, num_groups = (int(values.max()) + 1 if len(values) else 0 for values in (codes, self._groups))
        positive_codes = codes[self.positives]
        pairs = torch.stack([self._groups, positive_codes], dim=1).unique(dim=0)
        by_code = pairs[pairs[:, 1].argsort(stable=True)]
        codes_of_group = _Multimap(pairs[:, 0], pairs[:, 1], num_groups)
        groups_of_code = _Multimap(by_code[:, 1], by_code[:, 0], num_codes)
        documents = _Relation(self._groups, codes_of_group, codes, _Multimap(codes, self._documents, num_codes))
        self._relations[LossDirection.query_document].append(documents)
        self._relations[LossDirection.document_document].append(documents)
        self._relations[LossDirection.query_query].append(
            _Relation(self._groups, codes_of_group, positive_codes, _Multimap(positive_codes, self._queries, num_codes))
        )
        self._relations[LossDirection.document_query].append(
            _Relation(positive_codes, groups_of_code, self._groups, _Multimap(self._groups, self._queries, num_groups))
        )

    def mask_scores(self, scores: Tensor, direction: LossDirection, indices: Tensor, first: int) -> Tensor:
        """Set scores [c, t] of excluded candidates to -inf; in place, differentiable.

        Rows and candidates are counted over all ranks: `indices` int64 [c] of the rows, `first` of the first candidate.
        """
        width = scores.shape[1]
        positions = torch.arange(len(indices), device=indices.device)
        cells = [self._own_cells(direction, positions, indices, first, width)]
        for relation in self._relations[direction]:
            listed = relation.cells(positions, indices, first, width)
            if listed is None:
                mask = relation.mask(indices, first, width)
                if direction is LossDirection.document_query:
                    mask[self._within(positions, indices, first, width)] = False
                scores = scores.masked_fill_(mask, -torch.inf)
                continue
            if direction is LossDirection.document_query:
                other = listed[1] != indices[listed[0]]
                listed = listed[0][other], listed[1][other]
            cells.append((listed[0], listed[1] - first))
        row, column = (torch.cat([pair[i] for pair in cells]) for i in (0, 1))
        return scores.index_put_((row, column), scores.new_tensor(-torch.inf))

    def _own_cells(
        self, direction: LossDirection, positions: Tensor, indices: Tensor, first: int, width: int
    ) -> tuple[Tensor, Tensor]:
        match direction:
            case LossDirection.query_document:
                return self._within(positions, self.positives[indices], first, width)
            case LossDirection.document_query if self._score_positive_twice:
                return positions[:0], indices[:0]
            case LossDirection.document_query | LossDirection.query_query:
                return self._within(positions, indices, first, width)
            case LossDirection.document_document:
                return self.own_documents(indices, first, width)

    def own_documents(self, indices: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        """The cells (position in `indices`, candidate counted from `first`) of the rows' own documents."""
        positions = torch.arange(len(indices), device=indices.device)
        row, column = self._own_documents.pairs(positions, indices, first, width)
        return row, column - first

    def answers(self) -> Iterator[Tensor]:
        """Bool [M] for texts and for ids: this rank's documents that answer their own row's query, or an equal one."""
        local = slice(self._first_document, self._first_document + self._num_local)
        for codes in self._codes:
            span = int(codes.max()) + 1 if len(codes) else 1
            answers = self._groups * span + codes[self.positives]
            yield torch.isin(self._groups[self._owners[local]] * span + codes[local], answers)

    @staticmethod
    def _within(positions: Tensor, columns: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        inside = (columns >= first) & (columns < first + width)
        return positions[inside], columns[inside] - first


class _Multimap:
    """Maps keys [P] from 0 to `num_keys` - 1 to items [P], which ascend among equal keys."""

    def __init__(self, keys: Tensor, items: Tensor, num_keys: int) -> None:
        order = torch.argsort(keys, stable=True)
        self.items = items[order]
        self._span = int(items.max()) + 1 if len(items) else 1
        self._sorted = keys[order] * self._span + self.items  # ascending
        self.num_keys = num_keys

    def bounds(self, keys: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Offset and number of the items of each key from `first` to `first + width`."""
        low, high = min(first, self._span), min(first + width, self._span)
        starts = torch.searchsorted(self._sorted, keys * self._span + low)
        return starts, torch.searchsorted(self._sorted, keys * self._span + high) - starts

    def pairs(self, positions: Tensor, keys: Tensor, first: int = 0, width: int = 2**62) -> tuple[Tensor, Tensor]:
        """For each (position, key) all pairs (position, item of that key within the bounds): two int64 vectors."""
        starts, counts = self.bounds(keys, first, width)
        ends = counts.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        source = torch.repeat_interleave(torch.arange(len(keys), device=keys.device), counts, output_size=total)
        within = torch.arange(total, device=keys.device) - (ends - counts)[source]
        return positions[source], self.items[starts[source] + within]


@dataclass(frozen=True, slots=True)
class _Relation:
    """Row -> key -> codes -> candidates of that code: these candidates are no negatives of the row."""

    keys: Tensor  # int64 [N], of each row
    codes_of_key: _Multimap
    codes: Tensor  # int64, of each candidate
    candidates_of_code: _Multimap

    def cells(self, positions: Tensor, rows: Tensor, first: int, width: int) -> tuple[Tensor, Tensor] | None:
        """The cells (position, candidate) one by one; None if there are too many."""
        limit = int(MAX_LISTED * len(rows) * width) + len(rows)
        keys = self.keys[rows]
        if int(self.codes_of_key.bounds(keys, 0, 2**62)[1].sum()) > limit:
            return None
        position, codes = self.codes_of_key.pairs(positions, keys)
        if int(self.candidates_of_code.bounds(codes, first, width)[1].sum()) > limit:
            return None
        return self.candidates_of_code.pairs(position, codes, first, width)

    def mask(self, rows: Tensor, first: int, width: int) -> Tensor:
        """The same as a bool mask [c, t]."""
        keys, row_of = self.keys[rows].unique(return_inverse=True)
        table = torch.zeros(len(keys), self.candidates_of_code.num_keys, dtype=torch.bool, device=rows.device)
        table[self.codes_of_key.pairs(torch.arange(len(keys), device=rows.device), keys)] = True
        return table[:, self.codes[first : first + width]][row_of]
