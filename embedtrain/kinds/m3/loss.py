"""The loss of BGE-M3 over the documents of all ranks (Chen et al., 2024, "BGE M3-Embedding").

Texts have three scores: dense, lexical, and multi-vector (the mean over the query's tokens of MaxSim). With their sum
h, weighted by `hybrid_weights`, and CE the cross entropy of the positive in the softmax of scores / temperature over
all documents, the loss of a query is

    base = (CE(dense) + 0.1 CE(lexical) + CE(multi_vector) + CE(h)) / 4

and with self-distillation, where KD(s) = -sum softmax(h) log softmax(s) without a gradient of softmax(h),

    (base + (KD(dense) + 0.1 KD(lexical) + KD(multi_vector)) / 3) / 2.

With the softmax t of a teacher's scores of the query's own documents 0, 1, ..., CE(s) above becomes

    kl_div:      CE(s) - sum_k t_k log softmax_own(s)_k, whose softmax is over the own documents
    m3_kd_loss:  sum_k t_k CE_k(s), where CE_k is the cross entropy of document k without 0, ..., k - 1 in its softmax.

The three scores of a few queries with all documents are in memory at a time, and their gradient is computed at once.

B, M: queries and documents of this rank; K: documents of all ranks; R: rows of texts; c: queries of a tile; G: the most
documents of one query.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedtrain.config.loss_choices import KDLossType, LossDirection
from embedtrain.config.losses import M3LossConfig
from embedtrain.distributed.collectives import gather_rows
from embedtrain.kinds.late_interaction.score import SortedDocuments
from embedtrain.kinds.m3.score import (
    DENSE,
    TOKENS,
    LexicalTile,
    M3Score,
    Parts,
    compare_parts,
    split_rows,
    weighted_sum,
)
from embedtrain.losses.encoded import Encoded, Part, to_device
from embedtrain.losses.excluded import ExcludedCandidates, ExcludingLoss, Exclusion
from embedtrain.losses.score import Columns, Score, ScoreTile
from embedtrain.losses.similarity import rounding_tolerance
from embedtrain.losses.softmax import GradientInForward
from embedtrain.losses.types import BatchInfo, LossOutput, rows_per_rank

NAMES = ("dense", "lexical", "multi_vector")
# Scores of one tile of each kind: 16 MiB of float32; their softmaxes and gradients take about ten times as much.
TILE_CELLS = 1 << 22
# Numbers in the table of a tile's lexical weights, with a row per token and a column per query.
TABLE_CELLS = 1 << 24
# The logarithm of a probability of 0: finite, so that its product with a weight of 0 is 0 and not NaN.
_LOG_ZERO = -1e30


class M3Loss(ExcludingLoss):
    """See above. Every rank compares its queries with the documents of all ranks, or with their own ones.

    Logs the cross entropies (`ce/dense`, `ce/lexical`, `ce/multi_vector`, `ce/hybrid`), `accuracy`, the fraction of
    queries whose positive has the largest sum of scores, and `no_lexical`, the fraction of texts all of whose lexical
    weights are 0.
    """

    def __init__(self, config: M3LossConfig, score: Score | None) -> None:
        assert isinstance(score, M3Score), "rejected for other models"
        directions = (LossDirection.query_document,) if config.in_batch_negatives else ()
        super().__init__(Exclusion(directions=directions, duplicates=config.mask_duplicates))
        self.config, self.settings = config, score.settings

    def compute(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        score, counts = M3Score(self.settings), batch_info.rows.counts
        anchors, local = (split_rows(score.prepare(texts), self.settings) for texts in (queries, documents))
        terms = _Terms(
            config=self.config,
            weights=self.settings.weights,
            distils=self.config.self_distillation
            and batch_info.origin.batch >= self.config.self_distillation_start_step,
        )
        excluded = ExcludedCandidates.of(self.exclusion, batch_info)
        own = _OwnDocuments.of(batch_info, self.config)
        compare = self._all_documents if self.config.in_batch_negatives else self._own_documents
        texts_of_rank = _Compared(anchors, local, batch_info, excluded, own, terms)
        loss, row_losses, entropies, num_correct = compare(texts_of_rank)
        num_rows, num_texts = max(1, sum(counts.queries)), max(1, sum(counts.queries) + sum(counts.documents))
        metrics = {f"ce/{name}": term / num_rows for name, term in zip((*NAMES, "hybrid"), entropies, strict=True)}
        metrics["accuracy"] = num_correct / num_rows
        metrics["no_lexical"] = sum(_num_without_weight(part.lexical) for part in (anchors, local)) / num_texts
        return LossOutput(loss / num_rows, metrics, row_losses / num_rows)

    def _all_documents(self, compared: "_Compared") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each query against the documents of all ranks."""
        anchors, local, batch_info, excluded, own, terms = compared
        rows = batch_info.rows
        sizes, counts = rows.part_sizes.documents, rows.counts.documents
        assert sizes is not None
        gathered = Parts(
            *(
                Part(gather_rows(part.values, rows_per_rank(of_part, counts)), of_part)
                for part, of_part in zip(local, (None, sizes, sizes - 1), strict=True)
            )
        )
        columns = DENSE.columns(gathered.dense), gathered.lexical, TOKENS.columns(gathered.tokens)
        problem = _Problem(
            anchors=anchors,
            columns=columns,
            excluded=excluded,
            own=own.shifted(rows.local_documents.start),
            first=rows.local_rows.start,
            terms=terms,
        )
        values = [part.values for part in (*anchors, *columns)]
        return _Unified.apply(*values, problem)  # type: ignore[no-untyped-call,no-any-return]

    def _own_documents(self, compared: "_Compared") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each query against its own documents, in rows of G; autograd has the gradient."""
        anchors, local, batch_info, excluded, own, terms = compared
        owners = batch_info.owners
        scores = compare_parts(anchors, local, owners, batch_info.rows.local_num_documents)
        is_answer = torch.zeros(len(owners), dtype=torch.bool, device=owners.device)
        excluded.exclude_answers(is_answer, owners)
        masked = ~own.real | is_answer[own.columns]
        masked[:, 0] = False
        padded = [score[own.columns] / self.config.temperature for score in scores]
        row_losses, entropies, hybrid = terms.of_rows(padded, masked, own.in_rows())
        num_correct = _num_correct(hybrid.detach(), torch.zeros_like(own.columns[:, 0]))
        return row_losses.sum(), row_losses.detach(), entropies.detach(), num_correct


class _Compared(NamedTuple):
    """What a rank compares: its queries and documents, and how."""

    anchors: Parts
    local: Parts
    batch_info: BatchInfo
    excluded: ExcludedCandidates
    own: "_OwnDocuments"
    terms: "_Terms"


@dataclass(frozen=True, slots=True)
class _OwnDocuments:
    """The columns of the queries' own documents, the positive first."""

    columns: Tensor  # int64 [c, G]; the positive's where a query has fewer documents
    real: Tensor  # bool [c, G]
    teacher: Tensor | None  # [c, G], the teacher's scores divided by its temperature

    @classmethod
    def of(cls, batch_info: BatchInfo, config: M3LossConfig) -> "_OwnDocuments":
        """Of this rank, by the index among its documents."""
        counts, first = batch_info.rows.local_num_documents, batch_info.rows.local_positives
        offsets = np.arange(counts.max(initial=1))
        real = offsets < counts[:, None]
        device = batch_info.owners.device
        columns, is_real = to_device(np.where(real, first[:, None] + offsets, first[:, None]), device), real
        if config.kd_loss_type is KDLossType.none:
            return cls(columns, to_device(is_real, device), None)
        assert batch_info.scores is not None, "the data layer gives every document a score"
        return cls(columns, to_device(is_real, device), batch_info.scores[columns] / config.teacher_temperature)

    def slice(self, start: int, end: int) -> "_OwnDocuments":
        """The queries from `start` to `end`."""
        teacher = None if self.teacher is None else self.teacher[start:end]
        return _OwnDocuments(self.columns[start:end], self.real[start:end], teacher)

    def shifted(self, first: int) -> "_OwnDocuments":
        """By the index among the documents of all ranks, of which `first` is this rank's first one."""
        return replace(self, columns=self.columns + first)

    def in_rows(self) -> "_OwnDocuments":
        """By the index among a query's own documents."""
        offsets = torch.arange(self.columns.shape[1], device=self.columns.device)
        return replace(self, columns=torch.where(self.real, offsets, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """The terms of the loss, as functions of scores."""

    config: M3LossConfig
    weights: Sequence[float]  # of the three scores in their sum
    distils: bool

    def of_rows(self, scores: Sequence[Tensor], excluded: Tensor, own: _OwnDocuments) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each row [c], the sums of the four cross entropies [4], and the sum of scores [c, K].

        The scores [c, K] of each kind are divided by the temperature; those of `excluded` [c, K] are no candidates.
        """
        hybrid = weighted_sum(self.weights, scores)
        logs = [score.masked_fill(excluded, -torch.inf).log_softmax(dim=1) for score in (*scores, hybrid)]
        entropies = torch.stack([-log.gather(1, own.columns[:, :1]).squeeze(1) for log in logs])
        weights, terms = self.config.loss_weights, entropies
        if own.teacher is not None:
            is_target = own.real & ~excluded.gather(1, own.columns)
            target = own.teacher.masked_fill(~is_target, -torch.inf).softmax(dim=1).to(entropies.dtype)
            terms = torch.stack(
                [
                    self._with_teacher(log, entropy, own.columns, is_target, target)
                    for log, entropy in zip(logs, entropies, strict=True)
                ]
            )
        losses = weighted_sum(weights, terms.unbind()) / 4
        if self.distils:
            softmax = logs[3].detach().exp()
            distilled = [-(softmax * log.masked_fill(excluded, 0.0)).sum(dim=1) for log in logs[:3]]
            losses = (losses + weighted_sum(weights[:3], distilled) / 3) / 2
        return losses, entropies.sum(dim=1), hybrid.masked_fill(excluded, -torch.inf)

    def _with_teacher(self, log: Tensor, entropy: Tensor, columns: Tensor, is_target: Tensor, target: Tensor) -> Tensor:
        """The term [c] of a score whose log softmax is `log` [c, K] and whose cross entropy is `entropy` [c].

        `columns` [c, G] are the query's own documents, `is_target` those that are candidates, and `target` the
        teacher's softmax over these.
        """
        own = log.gather(1, columns).masked_fill(~is_target, _LOG_ZERO)
        if self.config.kd_loss_type is KDLossType.kl_div:
            return entropy - (target * own.log_softmax(dim=1)).sum(dim=1)
        others = log.scatter(1, columns, _LOG_ZERO).logsumexp(dim=1, keepdim=True)
        size = own.shape[1]
        is_before = torch.ones(size, size, dtype=torch.bool, device=log.device).tril(-1)
        following = own.unsqueeze(1).masked_fill(is_before, _LOG_ZERO).logsumexp(dim=2)
        return (target * (torch.logaddexp(others, following) - own)).sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """This rank's queries, the documents of all ranks, and how they are compared."""

    anchors: Parts
    columns: tuple[Columns, Columns, Columns]
    excluded: ExcludedCandidates
    own: _OwnDocuments  # among all documents
    first: int  # the number of the first query over all ranks
    terms: _Terms


class _Unified(GradientInForward):
    """The loss of this rank's queries, with the gradient computed at once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, problem = inputs[:-1], inputs[-1]
        grads = [torch.zeros_like(value) for value in values]
        anchors, columns = problem.anchors, problem.columns
        row_losses = values[0].new_zeros(len(anchors.dense))
        entropies = values[0].new_zeros(4)
        num_correct = torch.zeros((), dtype=torch.int64, device=entropies.device)
        scale = entropies.new_full((1,), 1 / problem.terms.config.temperature)
        for start, end in _row_slices(anchors, len(columns[0])):
            rows = anchors.slice(start, end)
            tiles = _tiles(rows, columns)
            shape = end - start, len(columns[0])
            scores = [tile.scores(scale, entropies.new_empty(shape)).requires_grad_() for tile in tiles]
            own = problem.own.slice(start, end)
            index = own.columns[:, 0]
            excluded = _is_excluded(problem, shape, start, index, scores[0])
            with torch.enable_grad():
                losses, of_scores, hybrid = problem.terms.of_rows(scores, excluded, own)
                tile_grads = torch.autograd.grad(losses.sum(), scores, allow_unused=True)
            row_losses[start:end] = losses.detach()
            entropies += of_scores.detach()
            num_correct += _num_correct(hybrid.detach(), index)
            weights = scale.expand(end - start).unsqueeze(1)
            for number, (tile, part, tile_grad) in enumerate(zip(tiles, anchors, tile_grads, strict=True)):
                if tile_grad is None:
                    continue
                tile.add_anchor_grads(part.with_values(grads[number]).slice(start, end).values, tile_grad, weights)
                tile.add_candidate_grads(grads[3 + number], tile_grad, weights)
        ctx.computed = grads
        ctx.mark_non_differentiable(row_losses, entropies, num_correct)
        return row_losses.sum(), row_losses, entropies, num_correct


def _tiles(rows: Parts, columns: tuple[Columns, Columns, Columns]) -> list[ScoreTile]:
    dense, lexical, tokens = columns
    assert isinstance(tokens, SortedDocuments)
    return [DENSE.tile(rows.dense, dense), LexicalTile(rows.lexical, lexical), TOKENS.tile(rows.tokens, tokens)]


def _is_excluded(problem: _Problem, shape: tuple[int, int], start: int, index: Tensor, like: Tensor) -> Tensor:
    """Which documents are no candidates, bool [c, K]; a row's own positive is one."""
    zeros = torch.zeros(shape, dtype=like.dtype, device=like.device)
    masked = problem.excluded.mask_scores(zeros, LossDirection.query_document, problem.first + start, 0)
    return (masked == -torch.inf).scatter_(1, index.unsqueeze(1), False)


def _num_correct(hybrid: Tensor, index: Tensor) -> Tensor:
    """Rows whose positive scores higher than all others by more than rounding."""
    positive = hybrid.gather(1, index.unsqueeze(1))
    others = hybrid.scatter(1, index.unsqueeze(1), -torch.inf)
    tolerance = rounding_tolerance(hybrid) * positive.abs()
    return (others.amax(dim=1, keepdim=True) < positive - tolerance).sum()


def _num_without_weight(part: Part) -> Tensor:
    """Texts without a lexical weight above 0."""
    texts = part.per_row(torch.arange(len(part), device=part.values.device))
    weights = part.values[:, 0].detach()
    return (weights.new_zeros(len(part)).index_add(0, texts, weights) == 0).sum()


def _row_slices(anchors: Parts, num_columns: int) -> list[tuple[int, int]]:
    """Queries of a tile: its maxima are remembered for each row, and its table grows with the square of the rows."""
    longest = anchors.tokens.max_size + 1
    height = max(1, min(TILE_CELLS // max(1, num_columns * longest), int((TABLE_CELLS // longest) ** 0.5)))
    num_rows = len(anchors.dense)
    return [(start, min(start + height, num_rows)) for start in range(0, num_rows, height)]
