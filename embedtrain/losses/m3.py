"""The loss of BGE-M3 over the documents of all ranks (Chen et al., 2024, "BGE M3-Embedding").

Texts have three scores: dense, lexical, and multi-vector (the mean over the query's tokens of MaxSim). With their sum
h, weighted by `hybrid_weights`, and CE the cross entropy of the positive in the softmax of scores / temperature over
all documents, the loss of a query is

    base = (CE(dense) + 0.1 CE(lexical) + CE(multi_vector) + CE(h)) / 4

and with self-distillation, where KD(s) = -sum softmax(h) log softmax(s) without a gradient of softmax(h),

    (base + (KD(dense) + 0.1 KD(lexical) + KD(multi_vector)) / 3) / 2.

The three scores of a few queries with all documents are in memory at a time, and their gradient is computed at once.

B, M: queries and documents of this rank; K: documents of all ranks; R: rows of texts.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.losses import LossDirection, M3LossConfig, Similarity
from embedtrain.config.m3 import M3Settings
from embedtrain.distributed.collectives import gather_rows
from embedtrain.losses.encoded import Encoded, Part, to_device
from embedtrain.losses.excluded import ExcludedCandidates, Exclusion
from embedtrain.losses.lexical import LexicalTile, compare_lexical
from embedtrain.losses.maxsim import MaxSim, SortedDocuments
from embedtrain.losses.score import Columns, Score, Tile, VectorScore
from embedtrain.losses.similarity import at_least_float32, rounding_tolerance
from embedtrain.losses.softmax import GradientInForward
from embedtrain.losses.types import BatchInfo, EncodedLoss, LossOutput, Prepared, rows_per_rank

NAMES = ("dense", "lexical", "multi_vector")
# Scores of one tile of each kind: 16 MiB of float32; their softmaxes and gradients take about ten times as much.
TILE_CELLS = 1 << 22
# Numbers in the table of a tile's lexical weights, with a row per token and a column per query.
TABLE_CELLS = 1 << 24

_DENSE, _TOKENS = VectorScore(Similarity.dot), MaxSim(mean=True)


class Parts(NamedTuple):
    """The three representations of texts, from the rows of an `M3Encoder`."""

    dense: Part
    lexical: Part  # rows (weight, id) of all tokens
    tokens: Part  # vectors of all tokens but the first of each text

    def slice(self, start: int, end: int) -> "Parts":
        """The texts from `start` to `end`."""
        return Parts(*(part.slice(start, end) for part in self))


def split_rows(part: Part, settings: M3Settings) -> Parts:
    """The representations; differentiable."""
    sizes = part.sizes
    assert sizes is not None, "a text has a row per token"
    starts = np.cumsum(sizes) - sizes
    others = np.ones(int(sizes.sum()), dtype=bool)
    others[starts] = False
    first, rest = (to_device(index, part.values.device) for index in (starts, np.flatnonzero(others)))
    return Parts(
        Part(part.values[first, : settings.dimension]),
        Part(part.values[:, -2:], sizes),
        Part(part.values[rest, : settings.token_dimension], sizes - 1),
    )


class M3Score(Score):
    """The weighted sum of the three scores."""

    def __init__(self, settings: M3Settings) -> None:
        self.settings = settings

    def prepare(self, encoded: Encoded) -> Part:
        """The rows as they are."""
        (part,) = encoded.parts
        return Part(at_least_float32(part.values), part.sizes)

    def compare(self, queries: Part, documents: Part, owners: Tensor, counts: NDArray[np.int64]) -> Tensor:
        """The score of each document and its query, [M]."""
        first, second = split_rows(queries, self.settings), split_rows(documents, self.settings)
        weights = self.settings.weights
        scores: Tensor = (
            weights.dense * _DENSE.compare(first.dense, second.dense, owners, counts)
            + weights.lexical * compare_lexical(first.lexical, second.lexical, owners)
            + weights.multi_vector * _TOKENS.compare(first.tokens, second.tokens, owners, counts)
        )
        return scores


class M3Loss(EncodedLoss):
    """See above. Every rank compares its queries with the documents of all ranks.

    Logs the cross entropies (`ce/dense`, `ce/lexical`, `ce/multi_vector`, `ce/hybrid`), `accuracy`, the fraction of
    queries whose positive has the largest sum of scores, and `no_lexical`, the fraction of texts all of whose lexical
    weights are 0.
    """

    def __init__(self, config: M3LossConfig, score: Score | None) -> None:
        super().__init__()
        assert isinstance(score, M3Score), "rejected for other models"
        self.config, self.settings = config, score.settings
        self.exclusion = Exclusion(directions=(LossDirection.query_document,), duplicates=config.mask_duplicates)

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """The excluded candidates."""
        if self.exclusion in batch_info.prepared:
            return {}
        return {self.exclusion: ExcludedCandidates.build(self.exclusion, batch_info.rows)}

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        with torch.autocast(queries.parts[0].values.device.type, enabled=False):
            return self._forward(queries, documents, batch_info)

    def _forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        score, rows = M3Score(self.settings), batch_info.rows
        anchors, local = (split_rows(score.prepare(texts), self.settings) for texts in (queries, documents))
        counts, sizes = rows.counts, rows.part_sizes.documents
        assert sizes is not None
        gathered = Parts(
            *(
                Part(gather_rows(part.values, rows_per_rank(of_part, counts.documents)), of_part)
                for part, of_part in zip(local, (None, sizes, sizes - 1), strict=True)
            )
        )
        columns = _DENSE.columns(gathered.dense), gathered.lexical, _TOKENS.columns(gathered.tokens)
        problem = _Problem(
            anchors=anchors,
            columns=columns,
            excluded=ExcludedCandidates.of(self.exclusion, batch_info),
            positives=batch_info.positives + rows.local_documents.start,
            first=rows.local_rows.start,
            config=self.config,
            weights=self.settings.weights,
            distils=self.config.self_distillation and batch_info.seed >= self.config.self_distillation_start_step,
        )
        values = [part.values for part in (*anchors, *columns)]
        loss, row_losses, terms, num_correct = _Unified.apply(*values, problem)  # type: ignore[no-untyped-call]
        num_rows, num_texts = max(1, sum(counts.queries)), max(1, sum(counts.queries) + sum(counts.documents))
        metrics = {f"ce/{name}": term / num_rows for name, term in zip((*NAMES, "hybrid"), terms, strict=True)}
        metrics["accuracy"] = num_correct / num_rows
        metrics["no_lexical"] = sum(_num_without_weight(part.lexical) for part in (anchors, local)) / num_texts
        return LossOutput(loss / num_rows, metrics, row_losses / num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """This rank's queries, the documents of all ranks, and how they are compared."""

    anchors: Parts
    columns: tuple[Columns, Columns, Columns]
    excluded: ExcludedCandidates
    positives: Tensor  # int64 [B], among all documents
    first: int  # the number of the first query over all ranks
    config: M3LossConfig
    weights: Sequence[float]  # of the three scores in their sum
    distils: bool


class _Unified(GradientInForward):
    """The loss of this rank's queries, with the gradient computed at once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, problem = inputs[:-1], inputs[-1]
        grads = [torch.zeros_like(value) for value in values]
        anchors, columns = problem.anchors, problem.columns
        row_losses = values[0].new_zeros(len(anchors.dense))
        terms = values[0].new_zeros(4)
        num_correct = torch.zeros((), dtype=torch.int64, device=terms.device)
        scale = terms.new_full((1,), 1 / problem.config.temperature)
        for start, end in _row_slices(anchors, len(columns[0])):
            rows = anchors.slice(start, end)
            tiles = _tiles(rows, columns)
            shape = end - start, len(columns[0])
            scores = [tile.scores(scale, terms.new_empty(shape)).requires_grad_() for tile in tiles]
            index = problem.positives[start:end]
            excluded = _is_excluded(problem, shape, start, index, scores[0])
            with torch.enable_grad():
                losses, entropies, hybrid = _row_losses(scores, excluded, index, problem)
                tile_grads = torch.autograd.grad(losses.sum(), scores, allow_unused=True)
            row_losses[start:end] = losses.detach()
            terms += entropies.detach()
            num_correct += _num_correct(hybrid.detach(), index)
            weights = scale.expand(end - start).unsqueeze(1)
            for number, (tile, part, tile_grad) in enumerate(zip(tiles, anchors, tile_grads, strict=True)):
                if tile_grad is None:
                    continue
                tile.add_anchor_grads(part.with_values(grads[number]).slice(start, end).values, tile_grad, weights)
                tile.add_candidate_grads(grads[3 + number], tile_grad, weights)
        ctx.computed = grads
        ctx.mark_non_differentiable(row_losses, terms, num_correct)
        return row_losses.sum(), row_losses, terms, num_correct


def _row_losses(
    scores: Sequence[Tensor], excluded: Tensor, index: Tensor, problem: _Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each row [c], the sums of the four cross entropies [4], and the sum of scores [c, K], all scaled."""
    hybrid = torch.stack([weight * score for weight, score in zip(problem.weights, scores, strict=True)]).sum(dim=0)
    logs = [score.masked_fill(excluded, -torch.inf).log_softmax(dim=1) for score in (*scores, hybrid)]
    entropies = torch.stack([-log.gather(1, index.unsqueeze(1)).squeeze(1) for log in logs])
    weights = entropies.new_tensor(problem.config.loss_weights)
    losses = (weights.unsqueeze(1) * entropies).sum(dim=0) / 4
    if problem.distils:
        target = logs[3].detach().exp()
        distilled = torch.stack([-(target * log.masked_fill(excluded, 0.0)).sum(dim=1) for log in logs[:3]])
        losses = (losses + (weights[:3].unsqueeze(1) * distilled).sum(dim=0) / 3) / 2
    return losses, entropies.sum(dim=1), hybrid.masked_fill(excluded, -torch.inf)


def _tiles(rows: Parts, columns: tuple[Columns, Columns, Columns]) -> list[Tile]:
    dense, lexical, tokens = columns
    assert isinstance(tokens, SortedDocuments)
    return [_DENSE.tile(rows.dense, dense), LexicalTile(rows.lexical, lexical), _TOKENS.tile(rows.tokens, tokens)]


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
