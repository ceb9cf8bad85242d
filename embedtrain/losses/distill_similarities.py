"""Distillation of the similarities within a batch: DistillSimilarities and SimilarityMSE.

Row i has scores s_ij of the student and t_ij of the teacher, both divided by their temperatures, q_i = softmax(s_i) and
p_i = softmax(t_i) over the same candidates:

    kl           sum_j p_ij (log p_ij - log q_ij)        dloss_i/ds_ij = q_ij - p_ij
    reverse_kl   sum_j q_ij (log q_ij - log p_ij)        dloss_i/ds_ij = q_ij (log q_ij - log p_ij - loss_i)
    js           the mean of KL(p_i || m_i) and KL(q_i || m_i), m_i = (p_i + q_i) / 2
    mse          the mean over the candidates of (s_ij - t_ij)^2, without softmax

The gradients are u_ij - q_ij sum_k u_ik for some u, so one pass over the candidates gives that of a row, once both of
its logsumexp are known. The gradient is computed in the forward pass and scaled in the backward pass, as in `softmax`.

B, M: queries and documents of this rank; N, K: of all ranks; c, t: rows and candidates of one tile; D, T: dimensions of
the student and of the teacher.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import (
    CandidateSet,
    DistillSimilaritiesConfig,
    Divergence,
    Implementation,
    LossDirection,
    Similarity,
    SimilarityMSEConfig,
)
from embedtrain.distributed.collectives import gather_rows, sum_over_ranks
from embedtrain.losses.distillation import teacher_dimension, teacher_vectors
from embedtrain.losses.encoded import Part
from embedtrain.losses.excluded import (
    QUERY_ANCHORS,
    QUERY_CANDIDATES,
    ExcludedCandidates,
    ExcludingLoss,
    Exclusion,
)
from embedtrain.losses.infonce import choose_implementation
from embedtrain.losses.ring import passing_texts
from embedtrain.losses.similarity import (
    add_exp,
    at_least_float32,
    finite,
    group_log_softmax,
    group_max,
    is_group_max,
    row_slices,
    sum_by_row,
)
from embedtrain.losses.softmax import GradientInForward
from embedtrain.losses.types import BatchInfo, GlobalRows, Loss, LossOutput

# Scores of one tile; about eight matrices of this size live at a time: 128 MiB of fp32.
TILE_CELLS = 1 << 22
_STUDENT, _TEACHER = 0, 1


@dataclass(frozen=True, slots=True)
class PairedVectors:
    """Both models' vectors of consecutive texts."""

    first: int  # index of the first one among those of all ranks
    student: Tensor  # [n, D]
    teacher: Tensor  # [n, T]

    def slice(self, start: int, end: int) -> "PairedVectors":
        """The texts from `start` to `end`."""
        return PairedVectors(self.first + start, self.student[start:end], self.teacher[start:end])

    def __len__(self) -> int:
        return len(self.student)


@dataclass(frozen=True, slots=True)
class DivergenceRules:
    """Which candidates a row is compared with, and how the two models' scores are."""

    divergence: Divergence
    direction: LossDirection
    excluded: ExcludedCandidates

    def mask(self, scores: Tensor, first_row: int, first: int) -> Tensor:
        """Bool [c, t], true where a candidate is left out of both softmaxes. A row's own positive stays."""
        marked = self.excluded.mask_scores(torch.zeros_like(scores), self.direction, first_row, first) < 0
        if self.direction is LossDirection.query_document and marked.numel():
            own = (self.excluded.positives[first_row : first_row + len(scores)] - first).unsqueeze(1)
            column = own.clamp(0, marked.shape[1] - 1)
            marked.scatter_(1, column, marked.gather(1, column) & (column != own))
        return marked

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of normalised candidates: the terms of the rows' sums, u and q; all finite for finite inputs."""
        q, p = log_q.exp(), log_p.exp()
        match self.divergence:
            case Divergence.kl:
                return p * (log_p - log_q), q - p, q
            case Divergence.reverse_kl:
                terms = q * (log_q - log_p)
                return terms, terms, q
            case _:
                log_m = torch.logaddexp(log_p, log_q) - math.log(2)
                u = 0.5 * q * (log_q - log_m)
                return u + 0.5 * p * (log_p - log_m), u, q


@dataclass(slots=True)
class _Tile:
    """The scores of both models of c rows and t candidates."""

    student: Tensor
    teacher: Tensor
    mask: Tensor

    @classmethod
    def of(cls, rows: PairedVectors, candidates: PairedVectors, rules: DivergenceRules) -> "_Tile":
        student, teacher = rows.student @ candidates.student.T, rows.teacher @ candidates.teacher.T
        return cls(student, teacher, rules.mask(student, rows.first, candidates.first))

    def derivatives(
        self, rules: DivergenceRules, lse: Sequence[Tensor], num_candidates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The terms of the rows' losses, u, and q, which `mse` has none of: [c, t], 0 where masked."""
        if rules.divergence is Divergence.mse:
            count = num_candidates.clamp(min=1).unsqueeze(1)
            difference = (self.student - self.teacher).masked_fill_(self.mask, 0.0)
            return difference.square() / count, 2 * difference / count, None
        # A masked score may be far above the logsumexp of the others: its exponential may overflow.
        log_q = (self.student - lse[_STUDENT].unsqueeze(1)).masked_fill_(self.mask, 0.0)
        log_p = (self.teacher - lse[_TEACHER].unsqueeze(1)).masked_fill_(self.mask, 0.0)
        terms, u, q = rules.terms(log_p, log_q)
        terms, u, q = (values.masked_fill(self.mask, 0.0) for values in (terms, u, q))
        return terms, u, q


class _RowStatistics:
    """Of c rows, over the candidates so far: both logsumexp, the number of candidates, and each model's best one."""

    def __init__(self, rows: PairedVectors) -> None:
        zeros = rows.student.new_zeros(len(rows))
        self.maximum = [torch.full_like(zeros, -torch.inf) for _ in (_STUDENT, _TEACHER)]
        self.sum_exp = [zeros.clone() for _ in self.maximum]
        self.best = [torch.zeros(len(rows), dtype=torch.int64, device=zeros.device) for _ in self.maximum]
        self.num_candidates = zeros.clone()

    def add(self, tile: _Tile, first: int) -> None:
        """Add further candidates, of which the first has this index."""
        if not tile.mask.shape[1]:  # torch has no maximum of an empty dimension
            return
        self.num_candidates += (~tile.mask).sum(dim=1)
        for model, values in enumerate((tile.student, tile.teacher)):
            scores = values.masked_fill(tile.mask, -torch.inf)
            highest, index = scores.max(dim=1)
            self.best[model] = torch.where(highest > self.maximum[model], index + first, self.best[model])
            add_exp(self.maximum[model], self.sum_exp[model], scores, highest)

    def logsumexp(self) -> list[Tensor]:
        """The student's and the teacher's, [c]; 0 for a row without candidates."""
        return [finite(maximum + sum_exp.log()) for maximum, sum_exp in zip(self.maximum, self.sum_exp, strict=True)]

    def num_agreeing(self) -> Tensor:
        """The number of rows with candidates whose best one is also the teacher's."""
        return ((self.best[_STUDENT] == self.best[_TEACHER]) & (self.num_candidates > 0)).sum()


@dataclass(frozen=True, slots=True)
class DivergenceSums:
    """Sums over this rank's rows: the differentiable loss, and the rows whose best candidate is the teacher's."""

    loss: Tensor
    row_losses: Tensor  # [B], detached: the terms of `loss`
    num_agreeing: Tensor


def tiled_divergence(
    rows: PairedVectors, candidates: PairedVectors, rules: DivergenceRules, tile_cells: int
) -> DivergenceSums:
    """This rank's rows against the candidates of all ranks, with at most `tile_cells` scores at a time, or one row."""
    return DivergenceSums(*_Tiled.apply(rows.student, candidates.student, (rows, candidates, rules, tile_cells)))  # type: ignore[no-untyped-call]


def ring_divergence(
    rows: PairedVectors, candidates: PairedVectors, rules: DivergenceRules, counts: tuple[Sequence[int], Sequence[int]]
) -> DivergenceSums:
    """As `tiled_divergence` with only this rank's `candidates`; those of other ranks pass by. A collective.

    `counts` are the rows and the candidates of each rank.
    """
    return DivergenceSums(*_Ring.apply(rows.student, candidates.student, (rows, candidates, rules, counts)))  # type: ignore[no-untyped-call]


class _Tiled(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any, _: Tensor, __: Tensor, rest: tuple[PairedVectors, PairedVectors, DivergenceRules, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, candidates, rules, tile_cells = rest
        row_grads, candidate_grads = torch.zeros_like(rows.student), torch.zeros_like(candidates.student)
        row_losses = rows.student.new_zeros(len(rows))
        num_agreeing = torch.zeros((), dtype=torch.int64, device=row_losses.device)
        for start, end in _slices(len(rows), len(candidates), tile_cells):
            tile_rows = rows.slice(start, end)
            tile = _Tile.of(tile_rows, candidates, rules)
            statistics = _RowStatistics(tile_rows)
            statistics.add(tile, 0)
            terms, u, q = tile.derivatives(rules, statistics.logsumexp(), statistics.num_candidates)
            row_losses[start:end] = terms.sum(dim=1)
            grads = u if q is None else u - q * u.sum(dim=1, keepdim=True)
            row_grads[start:end] = grads @ candidates.student
            candidate_grads.addmm_(grads.T, tile_rows.student)
            num_agreeing += statistics.num_agreeing()
        ctx.computed = row_grads, candidate_grads
        ctx.mark_non_differentiable(row_losses, num_agreeing)
        return row_losses.sum(), row_losses, num_agreeing


class _Ring(GradientInForward):
    """Candidates pass twice, for the logsumexp and for the rows' gradient; then rows pass, for the candidates'."""

    @staticmethod
    def forward(
        ctx: Any,
        _: Tensor,
        __: Tensor,
        rest: tuple[PairedVectors, PairedVectors, DivergenceRules, tuple[Sequence[int], Sequence[int]]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, candidates, rules, (row_counts, candidate_counts) = rest
        slices = _slices(len(rows), max(candidate_counts), TILE_CELLS)
        statistics = [_RowStatistics(rows.slice(start, end)) for start, end in slices]
        for passing, _more in _passing(candidates, [], candidate_counts):
            for (start, end), of_slice in zip(slices, statistics, strict=True):
                of_slice.add(_Tile.of(rows.slice(start, end), passing, rules), passing.first)
        zeros = rows.student.new_zeros(len(rows))
        row_losses, centers = zeros.clone(), zeros.clone()
        lse = [torch.cat([zeros[:0], *parts]) for parts in zip(*(part.logsumexp() for part in statistics), strict=True)]
        lse = lse or [zeros[:0], zeros[:0]]
        num_candidates = torch.cat([zeros[:0], *(of_slice.num_candidates for of_slice in statistics)])
        row_grads, softmax_grads = torch.zeros_like(rows.student), torch.zeros_like(rows.student)
        for passing, _more in _passing(candidates, [], candidate_counts):
            for start, end in slices:
                tile = _Tile.of(rows.slice(start, end), passing, rules)
                terms, u, q = tile.derivatives(rules, [values[start:end] for values in lse], num_candidates[start:end])
                row_losses[start:end] += terms.sum(dim=1)
                row_grads[start:end].addmm_(u, passing.student)
                if q is not None:
                    centers[start:end] += u.sum(dim=1)
                    softmax_grads[start:end].addmm_(q, passing.student)
        row_grads.addcmul_(centers.unsqueeze(1), softmax_grads, value=-1)
        candidate_grads = torch.zeros_like(candidates.student)
        for passing, (*passing_lse, number, center) in _passing(rows, [*lse, num_candidates, centers], row_counts):
            for start, end in _slices(len(passing), len(candidates), TILE_CELLS):
                tile_rows = passing.slice(start, end)
                tile = _Tile.of(tile_rows, candidates, rules)
                _terms, u, q = tile.derivatives(rules, [values[start:end] for values in passing_lse], number[start:end])
                grads = u if q is None else u - q * center[start:end].unsqueeze(1)
                candidate_grads.addmm_(grads.T, tile_rows.student)
        ctx.computed = row_grads, candidate_grads
        num_agreeing = torch.zeros((), dtype=torch.int64, device=zeros.device)
        for of_slice in statistics:
            num_agreeing += of_slice.num_agreeing()
        ctx.mark_non_differentiable(row_losses, num_agreeing)
        return row_losses.sum(), row_losses, num_agreeing


def _slices(num_rows: int, num_candidates: int, tile_cells: int) -> list[tuple[int, int]]:
    return row_slices(num_rows, max(1, tile_cells // max(1, num_candidates)))


def _passing(
    texts: PairedVectors, more: Sequence[Tensor], counts: Sequence[int]
) -> Iterator[tuple[PairedVectors, list[Tensor]]]:
    """Every rank's texts, `counts` of them, with further numbers of each; beginning with this rank's."""
    tensors = [texts.student, texts.teacher, *more]
    for passing in passing_texts(list(map(Part, tensors)), [None] * len(tensors), counts):
        student, teacher, *others = (part.values for part in passing.parts)
        yield PairedVectors(passing.first, student, teacher), others


class _Vectors(NamedTuple):
    """One model's vectors, whose inner products are compared."""

    queries: Tensor  # [B, D]
    documents: Tensor  # [M, D]


class DistillSimilarities(ExcludingLoss):
    """The teacher's softmax over the documents of the global batch is the target of the student's.

    For query i, p_i is the softmax over the documents of all ranks of the teacher's cosines divided by
    `teacher_temperature`, q_i that of the student's similarities divided by `temperature`; the loss is the mean over
    all queries of their divergence, by default KL(p_i || q_i). A candidate that is left
    out is left out of both. With `candidates=row` the softmaxes are over a row's own documents, and the mean is over
    rows with at least two. Logs `agreement`, the fraction of rows whose best candidate is also the teacher's.
    """

    def __init__(self, config: DistillSimilaritiesConfig, guide_dimensions: Mapping[str, int]) -> None:
        super().__init__()
        self.config = config
        self.teacher_dimension = teacher_dimension(config, guide_dimensions)

    def exclusion(self, rows: GlobalRows, width: int, dtype: torch.dtype) -> Exclusion:
        """See `ExcludingLoss`."""
        if self.config.candidates is CandidateSet.row:
            return Exclusion(directions=(), duplicates=self.config.mask_duplicates)
        return Exclusion(
            directions=tuple(self.config.directions),
            duplicates=self.config.mask_duplicates,
            score_positive_twice=True,  # a row's own pair is a candidate
            ring=self._implementation(rows, width, dtype) is Implementation.ring,
        )

    def _implementation(self, rows: GlobalRows, dimension: int, dtype: torch.dtype) -> Implementation:
        # The teacher's vectors are gathered without a gradient.
        gathered = dimension + (self.teacher_dimension or dimension) // 2
        return choose_implementation(self.config, rows.counts, gathered, dtype)

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with the teacher's [B, T] and [M, T] to this rank's loss."""
        vectors = at_least_float32(queries), at_least_float32(documents)
        if self.config.similarity is not Similarity.dot:
            vectors = F.normalize(vectors[0], dim=1), F.normalize(vectors[1], dim=1)
        student = _Vectors(*vectors)
        guide = teacher_vectors(self.config, batch_info).map_tensors(lambda tensor: tensor.to(student.queries))
        teacher = _Vectors(guide.comparable().queries, guide.comparable().documents)
        compute = self._within_rows if self.config.candidates is CandidateSet.row else self._within_batch
        with torch.autocast(queries.device.type, enabled=False):
            return compute(student, teacher, batch_info)

    def _within_batch(self, student: _Vectors, teacher: _Vectors, batch_info: BatchInfo) -> LossOutput:
        rows, (temperature, teacher_temperature) = batch_info.rows, self.config.temperatures
        dimension, dtype = student.documents.shape[1], student.documents.dtype
        implementation = self._implementation(rows, dimension, dtype)
        excluded = ExcludedCandidates.of(self.exclusion(rows, dimension, dtype), batch_info)
        sums = []
        for direction in self.config.directions:
            of_queries = direction in QUERY_CANDIDATES
            counts = rows.counts.queries if of_queries else rows.counts.documents
            first = (rows.local_rows if of_queries else rows.local_documents).start
            candidates = [model.queries if of_queries else model.documents for model in (student, teacher)]
            anchors = [
                model.queries if direction in QUERY_ANCHORS else model.documents[batch_info.positives]
                for model in (student, teacher)
            ]
            texts = PairedVectors(rows.local_rows.start, anchors[0] / temperature, anchors[1] / teacher_temperature)
            rules = DivergenceRules(self.config.divergence, direction, excluded)
            if implementation is Implementation.ring:
                sums.append(
                    ring_divergence(texts, PairedVectors(first, *candidates), rules, (rows.counts.queries, counts))
                )
                continue
            gathered = PairedVectors(0, *(gather_rows(vectors, counts) for vectors in candidates))
            plain = implementation is Implementation.plain
            tile_cells = max(1, len(texts) * len(gathered)) if plain else TILE_CELLS
            sums.append(tiled_divergence(texts, gathered, rules, tile_cells))
        return _mean(sums, max(1, sum(rows.counts.queries)))

    def _within_rows(self, student: _Vectors, teacher: _Vectors, batch_info: BatchInfo) -> LossOutput:
        """Each query against its own documents, in groups of any size; other ranks send only ids of texts."""
        owners, num_rows = batch_info.owners, batch_info.num_queries
        mask = torch.zeros(len(owners), dtype=torch.bool, device=owners.device)
        exclusion = self.exclusion(batch_info.rows, student.documents.shape[1], student.documents.dtype)
        excluded = ExcludedCandidates.of(exclusion, batch_info)
        excluded.exclude_answers(mask, owners)
        mask.index_fill_(0, batch_info.positives, value=False)
        scores = [
            (model.queries[owners] * model.documents).sum(dim=1) / temperature
            for model, temperature in zip((student, teacher), self.config.temperatures, strict=True)
        ]
        masked = [values.masked_fill(mask, -torch.inf) for values in scores]
        best = [is_group_max(values.detach(), owners, num_rows) for values in masked]
        if self.config.divergence is Divergence.mse:
            count = torch.zeros_like(student.queries[:, 0]).index_add(0, owners, (~mask).to(scores[0].dtype))
            terms = (scores[0] - scores[1]).masked_fill(mask, 0.0).square() / count.clamp(min=1)[owners]
        else:
            log_q, log_p = (group_log_softmax(values, owners, num_rows).masked_fill(mask, 0.0) for values in masked)
            rules = DivergenceRules(self.config.divergence, LossDirection.query_document, excluded)
            terms = rules.terms(log_p, log_q)[0].masked_fill(mask, 0.0)
        # The divergence of a single document is 0, whatever the vectors are.
        needed = 0 if self.config.divergence is Divergence.mse else 1
        total = max(1, int(np.count_nonzero(batch_info.rows.num_documents > needed)))
        # `bincount` would wait for the device, whose largest owner it reads.
        several = sum_by_row(torch.ones_like(terms), owners, num_rows) > needed
        both = group_max((best[0] & best[1]).to(terms.dtype), owners, num_rows).clamp(min=0.0)
        metrics = {"agreement": (both * several).sum() / total}
        return LossOutput(terms.sum() / total, metrics, sum_by_row(terms, owners, num_rows) / total)


class SimilarityMSE(Loss):
    """The mean over all pairs of texts of the global batch of the squared difference of their cosines (Jasper, 2024).

    With the normalised vectors of all n texts, queries and documents, X [n, D] of the student and A [n, T] of the
    teacher, |XX' - AA'|^2 = |X'X|^2 - 2 |X'A|^2 + |A'A|^2: matrices of D x D, D x T and T x T that are summed over the
    ranks, instead of the n x n cosines. The diagonal of the difference is 0. The terms are of the size of n^2 and their
    sum is not, so it is computed in float64.
    """

    def __init__(self, config: SimilarityMSEConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with the teacher's [B, T] and [M, T] to this rank's loss."""
        guide = teacher_vectors(self.config, batch_info)
        with torch.autocast(queries.device.type, enabled=False):
            student = F.normalize(torch.cat([queries, documents]).double(), dim=1)
            teacher = F.normalize(torch.cat([guide.queries, guide.documents]).double(), dim=1)
            own, cross = sum_over_ranks(student.T @ student), sum_over_ranks(student.T @ teacher)
            target = sum_over_ranks(teacher.T @ teacher)
            squares = own.square().sum() - 2 * cross.square().sum() + target.square().sum()
        counts = batch_info.rows.counts
        num_texts = sum(counts.queries) + sum(counts.documents)
        loss = squares / max(1, num_texts * (num_texts - 1)) / len(counts.queries)
        return LossOutput(loss.to(at_least_float32(queries[:0]).dtype))


def _mean(sums: list[DivergenceSums], num_rows: int) -> LossOutput:
    """The mean of the directions, divided by the number of rows of all ranks."""
    total = num_rows * len(sums)
    loss, row_losses, num_agreeing = (
        torch.stack([getattr(part, name) for part in sums]).sum(dim=0)
        for name in ("loss", "row_losses", "num_agreeing")
    )
    return LossOutput(loss / total, {"agreement": num_agreeing / total}, row_losses / total)
