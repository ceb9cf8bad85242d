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

The three scores of a few queries with all documents are in memory at a time, and their gradient is computed at once; or
documents travel around a ring of ranks.

B, M: queries and documents of this rank; K: documents of all ranks; R: rows of texts; c: queries of a tile; G: the most
documents of one query.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedtrain.config.losses import Implementation, KDLossType, LossDirection, M3LossConfig
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
from embedtrain.losses.ring import Block, Reducer, Texts, gather_part, ring_statistics, uses_ring
from embedtrain.losses.score import Columns, Score, ScoreTile
from embedtrain.losses.similarity import add_exp, at_least_float32, finite, rounding_tolerance, row_slices
from embedtrain.losses.softmax import GradientInForward
from embedtrain.losses.types import BatchInfo, EncodedLoss, GlobalRows, LossOutput

NAMES = ("dense", "lexical", "multi_vector")
# Scores of one tile of each kind: 16 MiB of float32; their softmaxes and gradients take about ten times as much.
TILE_CELLS = 1 << 22
# Numbers in the table of a tile's lexical weights, with a row per token and a column per query.
TABLE_CELLS = 1 << 24
# The logarithm of a probability of 0: finite, so that its product with a weight of 0 is 0 and not NaN.
_LOG_ZERO = -1e30


class M3Loss(ExcludingLoss, EncodedLoss):
    """See above. Every rank compares its queries with the documents of all ranks, or with their own ones.

    Logs the cross entropies (`ce/dense`, `ce/lexical`, `ce/multi_vector`, `ce/hybrid`), `accuracy`, the fraction of
    queries whose positive has the largest sum of scores, and `no_lexical`, the fraction of texts all of whose lexical
    weights are 0.
    """

    def __init__(self, config: M3LossConfig, score: Score | None) -> None:
        assert isinstance(score, M3Score), "rejected for other models"
        super().__init__()
        self.config, self.settings = config, score.settings

    def exclusion(self, rows: GlobalRows, width: int, dtype: torch.dtype) -> Exclusion:
        """Around a ring, queries are compared with their own documents apart from the others."""
        if not self.config.in_batch_negatives:
            return Exclusion(directions=(), duplicates=self.config.mask_duplicates)
        ring = uses_ring(self.config.implementation, rows, width, dtype)
        return Exclusion(
            directions=(LossDirection.query_document,),
            duplicates=self.config.mask_duplicates,
            ring=ring,
            own_answers=ring,
        )

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        with torch.autocast(queries.parts[0].values.device.type, enabled=False):  # it would round products to bf16
            return self._forward(queries, documents, batch_info)

    def _forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        score, counts = M3Score(self.settings), batch_info.rows.counts
        anchors, local = (split_rows(score.prepare(texts), self.settings) for texts in (queries, documents))
        terms = _Terms(
            config=self.config,
            weights=self.settings.weights,
            distils=self.config.self_distillation
            and batch_info.origin.batch >= self.config.self_distillation_start_step,
        )
        values = queries.parts[0].values
        exclusion = self.exclusion(batch_info.rows, values.shape[1], at_least_float32(values[:0]).dtype)
        excluded = ExcludedCandidates.of(exclusion, batch_info)
        own = _OwnDocuments.of(batch_info, self.config)
        in_batch = self._around_ring if exclusion.ring else self._all_documents
        compare = in_batch if self.config.in_batch_negatives else self._own_documents
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
        of_parts = (None, sizes, sizes - 1)
        gathered = Parts(*(gather_part(part, of, counts) for part, of in zip(local, of_parts, strict=True)))
        columns = DENSE.columns(gathered.dense), gathered.lexical, TOKENS.columns(gathered.tokens)
        problem = _Problem(
            anchors=anchors,
            columns=columns,
            excluded=excluded,
            own=own.shifted(rows.local_documents.start),
            first=rows.local_rows.start,
            terms=terms,
            is_plain=self.config.implementation is Implementation.plain,
        )
        values = [part.values for part in (*anchors, *columns)]
        return _Unified.apply(*values, problem)  # type: ignore[no-untyped-call,no-any-return]

    def _own_documents(self, compared: "_Compared") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each query against its own documents, in rows of G; autograd has the gradient."""
        padded, masked = self._own_scores(compared)
        row_losses, entropies, hybrid = compared.terms.of_rows(padded, masked, compared.own.in_rows())
        num_correct = _num_correct(hybrid.detach(), torch.zeros_like(compared.own.columns[:, 0]))
        return row_losses.sum(), row_losses.detach(), entropies.detach(), num_correct

    def _around_ring(self, compared: "_Compared") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each query against its own documents, and the documents of all ranks by statistics of their scores."""
        anchors, local, batch_info, excluded, own, terms = compared
        rows, (of_queries, of_documents) = batch_info.rows, batch_info.rows.part_sizes
        assert of_queries is not None
        assert of_documents is not None
        statistics = ring_statistics(
            _OtherDocuments(excluded, to_device(rows.num_documents, own.columns.device), terms),
            Texts(rows.local_rows.start, tuple(anchors)),
            Texts(rows.local_documents.start, tuple(local)),
            rows,
            ((None, of_queries, of_queries - 1), (None, of_documents, of_documents - 1)),
        )
        padded, masked = self._own_scores(compared)
        # The others are one more column, of their logsumexp.
        *others, of_hybrid = statistics[:, :4].split(1, dim=1)
        highest = statistics.detach()[:, 7:]
        row_losses, entropies, hybrid = terms.of_rows(
            [torch.cat(parts, dim=1) for parts in zip(padded, others, strict=True)],
            torch.cat([masked, highest == -torch.inf], dim=1),
            own.in_rows(),
            torch.cat([weighted_sum(terms.weights, padded), of_hybrid], dim=1),
            statistics[:, 4:7],
        )
        hybrid = torch.cat([hybrid.detach()[:, :-1], highest], dim=1)
        num_correct = _num_correct(hybrid, torch.zeros_like(own.columns[:, 0]))
        return row_losses.sum(), row_losses.detach(), entropies.detach(), num_correct

    def _own_scores(self, compared: "_Compared") -> tuple[list[Tensor], Tensor]:
        """The three scores of each query's own documents, [c, G], and which of these are no candidates."""
        owners, own = compared.batch_info.owners, compared.own
        counts = compared.batch_info.rows.local_num_documents
        scores = compare_parts(compared.anchors, compared.local, owners, counts)
        is_answer = torch.zeros(len(owners), dtype=torch.bool, device=owners.device)
        compared.excluded.exclude_answers(is_answer, owners)
        masked = ~own.real | is_answer[own.columns]
        masked[:, 0] = False
        return [score[own.columns] / self.config.temperature for score in scores], masked


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

    def of_rows(
        self,
        scores: Sequence[Tensor],
        excluded: Tensor,
        own: _OwnDocuments,
        hybrid: Tensor | None = None,
        expected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each row [c], the sums of the four cross entropies [4], and the sum of scores [c, K].

        The scores [c, K] of each kind are divided by the temperature; those of `excluded` [c, K] are no candidates. If
        the last column is a logsumexp over other documents, `hybrid` [c, K] has it of their sums, and `expected` [c, 3]
        are their mean scores, weighted by the softmax of these sums.
        """
        hybrid = weighted_sum(self.weights, scores) if hybrid is None else hybrid
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
            if expected is not None:
                distilled = [
                    term - softmax[:, -1] * (mean - score[:, -1])
                    for term, mean, score in zip(distilled, expected.unbind(dim=1), scores, strict=True)
                ]
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
    is_plain: bool  # whether all scores are in memory at a time


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
        slices = _row_slices(anchors, len(columns[0]), whole=problem.is_plain)
        for start, end in slices:
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


class _OtherDocuments(Reducer):
    """Of each query and the documents of other queries: statistics of their scores, divided by the temperature.

    The logsumexp of each of the three scores and of their sum, 0 if there are none; the mean of the three scores,
    weighted by the softmax of the sum, without its gradient; and the largest sum. Args: `num_documents` [N].
    """

    def __init__(self, excluded: ExcludedCandidates, num_documents: Tensor, terms: _Terms) -> None:
        self.excluded, self.num_documents, self.terms = excluded, num_documents, terms

    def columns(self, parts: Sequence[Part]) -> tuple[Columns, ...]:
        """The three representations as candidates."""
        dense, lexical, tokens = parts
        return DENSE.columns(dense), lexical, TOKENS.columns(tokens)

    def slices(self, rows: Texts, num_candidates: int) -> list[tuple[int, int]]:
        """As without the ring."""
        return _row_slices(Parts(*rows.parts), num_candidates)

    def start(self, rows: Texts) -> tuple[Part, ...]:
        """Four maxima, four sums of exp, and three sums of scores times exp of their sum."""
        values = rows.parts[0].values.new_zeros(len(rows), 11)
        values[:, :4] = -torch.inf
        return (Part(values),)

    def collect(self, number: int, rows: Texts, known: Sequence[Part], block: Block) -> None:
        """Add further documents."""
        _tiles_of, scores, mask = self._scores(rows, block)
        maxima, sums, weighted = known[0].values.split([4, 4, 3], dim=1)
        for index, score in enumerate((*scores, weighted_sum(self.terms.weights, scores))):
            exp = score.masked_fill(mask, -torch.inf)
            rescale = add_exp(maxima[:, index], sums[:, index], exp)
            if index == 3:
                products = torch.stack([(exp * each).sum(dim=1) for each in scores], dim=1)
                weighted.copy_(weighted * rescale.unsqueeze(1) + products)

    def finish(self, known: Sequence[Part]) -> tuple[Tensor, tuple[Part, ...]]:
        """See the class."""
        maxima, sums, weighted = known[0].values.split([4, 4, 3], dim=1)
        lse = finite(maxima + sums.log())
        mean = weighted / sums[:, 3:].masked_fill(sums[:, 3:] == 0, 1.0)
        return torch.cat([lse, mean, maxima[:, 3:]], dim=1), (Part(lse),)

    def derivatives(
        self, rows: Texts, kept: Sequence[Part], upstream: Tensor, block: Block
    ) -> list[tuple[ScoreTile, Tensor, Tensor]]:
        """Of each score: its own softmax, and that of the sum."""
        tiles, scores, mask = self._scores(rows, block)
        lse = kept[0].values
        hybrid = weighted_sum(self.terms.weights, scores).masked_fill_(mask, -torch.inf)
        hybrid = hybrid.sub_(lse[:, 3:]).exp_()
        factors = zip(tiles, scores, self.terms.weights, strict=True)
        grads = []
        for index, (tile, score, weight) in enumerate(factors):
            own = score.masked_fill_(mask, -torch.inf).sub_(lse[:, index : index + 1]).exp_()
            of_hybrid = weight * upstream[:, 3] + upstream[:, 4 + index]
            grads.append((tile, own * upstream[:, index : index + 1] + hybrid * of_hybrid.unsqueeze(1)))
        scale = upstream.new_full((len(rows), 1), 1 / self.terms.config.temperature)
        return [(tile, grad, scale) for tile, grad in grads]

    def _scores(self, rows: Texts, block: Block) -> tuple[list[ScoreTile], list[Tensor], Tensor]:
        """The tiles and their scores [c, t], and which of the documents do not count: excluded and own ones."""
        dense, lexical, tokens = block.columns
        tiles = _tiles(Parts(*rows.parts), (dense, lexical, tokens))
        values = rows.parts[0].values
        scale = values.new_full((1,), 1 / self.terms.config.temperature)
        shape = len(rows), len(block)
        scores = [tile.scores(scale, values.new_empty(shape)) for tile in tiles]
        mask = self.excluded.mask_scores(values.new_zeros(shape), LossDirection.query_document, rows.first, block.first)
        numbers = torch.arange(block.first, block.first + len(block), device=values.device)
        first = self.excluded.positives[rows.first : rows.first + len(rows)].unsqueeze(1)
        end = first + self.num_documents[rows.first : rows.first + len(rows)].unsqueeze(1)
        return tiles, scores, (mask == -torch.inf) | ((numbers >= first) & (numbers < end))


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


def _row_slices(anchors: Parts, num_columns: int, *, whole: bool = False) -> list[tuple[int, int]]:
    """Queries of a tile: its maxima are remembered for each row, and its table grows with the square of the rows.

    Or all queries in the `whole`.
    """
    longest = anchors.tokens.max_size + 1
    height = max(1, min(TILE_CELLS // max(1, num_columns * longest), int((TABLE_CELLS // longest) ** 0.5)))
    num_rows = len(anchors.dense)
    height = max(height, num_rows) if whole else height
    return row_slices(num_rows, height)
