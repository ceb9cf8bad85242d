"""The softmax of InfoNCE over all candidates: all scores at once, a few rows at a time, or around a ring of ranks.

For row i with positive score z_ip and negatives z_ij = scale * s(a_i, c_j), in each partition of its directions:

    gap_i = logsumexp_j z_ij - z_ip        loss_i = softplus(gap_i)        sigma_i = sigmoid(gap_i)
    dloss_i/dz_ij = exp(z_ij - z_ip - loss_i) = sigma_i * softmax_j(z_ij)        dloss_i/dz_ip = -sigma_i

This is -log softmax in its softplus form, in which nothing cancels when losses are small. `plain_softmax` holds all
scores and leaves the gradient to autograd. `tiled_softmax` computes the gradient in the forward pass, a few rows of
scores at a time: a row's logsumexp is final at once, so its scores become its gradient in place and nothing is computed
twice; the backward pass only scales the result. The gradient of the scale needs no scores: z is homogeneous of degree 1
in the rows of the anchors, so it is sum_i <a_i, da_i> / scale (Euler). `focal_weights` multiplies loss_i and sigma_i.

`ring_softmax` is for batches whose candidates no rank could hold: they travel around the ranks. While they pass, each
row keeps its largest score, the sum of exp(z_ij) and the gradient of that sum online, as in flash attention (Dao et
al., 2022) with candidates for keys and values. Then the rows travel, and every rank adds up the gradient of its own
candidates. Communication overlaps with computation, and gradients never travel.

B: rows of this rank; c, t: rows and candidates of one tile; T: dimensions of the guide's vectors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import Hardness, LossDirection
from embedtrain.losses.encoded import Part
from embedtrain.losses.excluded import QUERY_ANCHORS, QUERY_CANDIDATES, ExcludedCandidates
from embedtrain.losses.ring import passing_parts, passing_texts
from embedtrain.losses.score import Columns, ScoreTile, TiledScore
from embedtrain.losses.similarity import add_exp, finite, row_max, row_slices
from embedtrain.losses.types import GlobalRows

# Scores of one tile: 64 MiB of fp32. Lower tiles would read and write the gradient of the candidates more often.
TILE_CELLS = 1 << 24
MIN_TILE_ROWS = 64

# Directions that share a softmax.
Partitions = Sequence[Sequence[LossDirection]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Consecutive rows of the batch: one query and its positive each."""

    first: int  # index of the first one among the rows of all ranks
    queries: Part  # c texts
    positives: Part | None  # c texts, if they are the anchors of a direction
    accuracy_thresholds: Tensor  # [c], a candidate that scores at least this ties or beats the positive
    score_limits: Tensor | None = None  # [c], candidates that score more are no negatives
    guide_queries: Tensor | None = None  # [c, T]
    guide_positives: Tensor | None = None  # [c, T]
    guide_limits: Tensor | None = None  # [c], candidates more similar than this to the guide are no negatives
    mixed_losses: Tensor | None = None  # [c], that of a softmax without candidates, see mixing.py

    def slice(self, start: int, end: int) -> "Rows":
        """The rows from `start` to `end`."""
        tensors = {name: None if value is None else value[start:end] for name, value in self.tensors().items()}
        return Rows(
            first=self.first + start,
            queries=self.queries.slice(start, end),
            positives=None if self.positives is None else self.positives.slice(start, end),
            **tensors,  # type: ignore[arg-type]
        )

    def tensors(self) -> dict[str, Tensor | None]:
        """The fields with one number or one vector per row, by name."""
        names = [field.name for field in fields(self) if field.name not in ("first", "queries", "positives")]
        return {name: getattr(self, name) for name in names}

    def anchors(self, direction: LossDirection) -> Part:
        """The c texts that a direction compares with its candidates."""
        part = self.queries if direction in QUERY_ANCHORS else self.positives
        assert part is not None
        return part

    def __len__(self) -> int:
        return len(self.accuracy_thresholds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Queries and documents that rows are compared with."""

    first_query: int  # index of the first one among those of all ranks, as `first_document`
    first_document: int
    documents: Columns  # t texts
    queries: Columns | None = None  # t texts, if a direction uses them
    guide_queries: Tensor | None = None  # [t, T]
    guide_documents: Tensor | None = None  # [t, T]

    def of(self, direction: LossDirection) -> Columns:
        """The t candidates of a direction."""
        columns = self.queries if direction in QUERY_CANDIDATES else self.documents
        assert columns is not None
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRules:
    """How scores become terms of the loss: options of InfoNCEConfig, and the batch's excluded candidates."""

    score: TiledScore
    excluded: ExcludedCandidates
    hardness: Hardness
    hardness_strength: float
    focal: float

    def tile(self, direction: LossDirection, rows: Rows, candidates: Candidates) -> ScoreTile:
        """The anchors of the rows and the candidates of a direction."""
        return self.score.tile(rows.anchors(direction), candidates.of(direction))

    def scores(
        self,
        tile: ScoreTile,
        direction: LossDirection,
        rows: Rows,
        candidates: Candidates,
        scale: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """The scores of a tile times `scale`, [c, t]; -inf where a candidate is no negative.

        Differentiable, except with `out`: a buffer that the scores are written to.
        """
        scores = tile.scores(scale, out)
        first = candidates.first_query if direction in QUERY_CANDIDATES else candidates.first_document
        mask = None
        if rows.score_limits is not None:
            mask = scores.detach() > rows.score_limits.unsqueeze(1)
        if rows.guide_limits is not None:
            guide_mask = self._guide_mask(direction, rows, candidates)
            mask = guide_mask if mask is None else mask.logical_or_(guide_mask)
        if mask is not None:
            if direction is LossDirection.document_query:  # the positive pair itself stays
                mask.diagonal(rows.first - first).fill_(False)
            scores = scores.masked_fill_(mask, -torch.inf)
        if self.hardness is not Hardness.none and direction is LossDirection.query_document:
            scores = self._add_hardness(scores, rows, candidates, scale)
        return self.excluded.mask_scores(scores, direction, rows.first, first)

    def _guide_mask(self, direction: LossDirection, rows: Rows, candidates: Candidates) -> Tensor:
        """[c, t], true where the guide finds a candidate closer than the positive (Solatorio, 2024)."""
        columns = candidates.guide_queries if direction in QUERY_CANDIDATES else candidates.guide_documents
        anchors = rows.guide_queries if direction in QUERY_ANCHORS else rows.guide_positives
        assert anchors is not None
        assert columns is not None
        assert rows.guide_limits is not None
        return (anchors @ columns.T) > rows.guide_limits.unsqueeze(1)

    def _add_hardness(self, scores: Tensor, rows: Rows, candidates: Candidates, scale: Tensor) -> Tensor:
        """Add strength * similarity, without gradient, to the scores of the negatives that `hardness` names."""
        if not scores.numel():
            return scores
        bonus = scores.detach() * (self.hardness_strength / scale.detach().double()).to(scores.dtype)
        own = self.excluded.own_documents(rows.first, len(rows), candidates.first_document)
        match self.hardness:
            case Hardness.in_batch:
                bonus.index_put_(own, bonus.new_zeros(()))
            case Hardness.hard:
                own_bonus = bonus[own]
                bonus = torch.zeros_like(bonus).index_put_(own, own_bonus)
        # -inf - (-inf) would be NaN; excluded candidates stay excluded.
        return scores.add_(bonus.masked_fill_(bonus == -torch.inf, 0.0))


@dataclass(frozen=True, slots=True)
class SoftmaxSums:
    """Sums over this rank's rows: the differentiable loss, and the rows whose positive beats every negative."""

    loss: Tensor
    num_correct: Tensor
    row_losses: Tensor  # [B], detached: the terms of `loss`
    row_weights: Tensor | None = None  # [B], detached: factors of the rows in the last partition

    def plus(self, losses: Tensor | None) -> "SoftmaxSums":
        """The sums with a further loss of each row, [B], which has the weight of the row; for one partition."""
        if losses is None:
            return self
        assert self.row_weights is not None
        terms = losses * self.row_weights
        return replace(self, loss=self.loss + terms.sum(), row_losses=self.row_losses + terms.detach())


def plain_softmax(
    rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor, positive: Tensor, partitions: Partitions
) -> SoftmaxSums:
    """This rank's rows against the candidates of all ranks; the scores are held until the backward pass.

    `scale` [1] is one over the temperature, and `positive` [B] the positives' scores, scaled, with the margin.
    """
    loss, num_correct = positive.new_zeros(()), torch.zeros((), dtype=torch.int64, device=positive.device)
    row_losses = weights = torch.zeros_like(positive)
    for directions in partitions:
        blocks = []
        for direction in directions:
            tile = rules.tile(direction, rows, candidates)
            blocks.append(rules.scores(tile, direction, rows, candidates, scale))
        maxima = [row_max(block.detach()) for block in blocks]
        num_correct = add_correct(num_correct, directions, maxima, rows)
        scores = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        # A row without negatives has loss 0; finite scores make its gradient 0 instead of NaN.
        no_negatives = torch.stack(maxima).amax(dim=0) == -torch.inf
        scores = scores.masked_fill_(no_negatives.unsqueeze(1), 0.0)
        lse = torch.logsumexp(scores, dim=1) if scores.shape[1] else torch.zeros_like(positive)
        gap = (lse - positive).masked_fill(no_negatives, -torch.inf)
        weights = focal_weights(gap, rules.focal, rows.mixed_losses)
        terms = F.softplus(gap) * weights
        loss = loss + terms.sum() / len(partitions)
        row_losses = row_losses + terms.detach() / len(partitions)
    return SoftmaxSums(loss, num_correct, row_losses, weights)


def tiled_softmax(
    rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor, positive: Tensor, partitions: Partitions
) -> SoftmaxSums:
    """As `plain_softmax`, with a few rows of scores in memory at a time and the gradient computed at once."""
    sums = _Tiled.apply(  # type: ignore[no-untyped-call]
        *differentiable(rows, candidates, scale, positive), (rows, candidates, rules, partitions)
    )
    return SoftmaxSums(*sums)


def differentiable(rows: Rows, candidates: Candidates, scale: Tensor, positive: Tensor) -> tuple[Tensor | None, ...]:
    """The inputs of `GradientInForward` that have a gradient."""
    return (
        rows.queries.values,
        None if rows.positives is None else rows.positives.values,
        candidates.documents.values,
        None if candidates.queries is None else candidates.queries.values,
        scale,
        positive,
    )


def focal_weights(gap: Tensor, exponent: float, further: Tensor | None = None) -> Tensor:
    """(1 - p)^exponent of each row, where p = sigmoid(-gap) is its positive's probability; without gradient.

    With a further loss of each row, detached, p is exp(-(loss + further)).
    """
    gap = gap.detach()
    missing = torch.sigmoid(gap) if further is None else -torch.expm1(-(F.softplus(gap) + further))
    return missing**exponent


def add_correct(
    num_correct: Tensor, directions: Sequence[LossDirection], maxima: Sequence[Tensor], rows: Rows
) -> Tensor:
    """Add the rows whose positive beats all documents, in the partition that has that direction."""
    if LossDirection.query_document not in directions:
        return num_correct
    maximum = maxima[list(directions).index(LossDirection.query_document)]
    return num_correct + (maximum < rows.accuracy_thresholds).sum()


class GradientInForward(torch.autograd.Function):
    """Inputs: those that have a gradient, and a tuple of everything else. Outputs: the loss, and what has none."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass computed."""
        computed, ctx.computed = ctx.computed, None
        assert computed is not None, "this loss has no second backward pass: its gradient is scaled in place"
        return *(None if grad is None else grad.mul_(grads[0]) for grad in computed), None


@dataclass(slots=True)
class Gradients:
    """The gradient of the sum of the rows' losses, accumulated tile by tile."""

    queries: Tensor
    positives: Tensor | None
    documents: Tensor
    candidate_queries: Tensor | None

    @classmethod
    def zeros(cls, rows: Rows, candidates: Candidates) -> "Gradients":
        """Before the first tile."""
        return cls(
            torch.zeros_like(rows.queries.values),
            None if rows.positives is None else torch.zeros_like(rows.positives.values),
            torch.zeros_like(candidates.documents.values),
            None if candidates.queries is None else torch.zeros_like(candidates.queries.values),
        )

    def anchors(self, direction: LossDirection) -> Tensor:
        """The gradient that the anchors of a direction contribute to."""
        grads = self.queries if direction in QUERY_ANCHORS else self.positives
        assert grads is not None
        return grads

    def candidates(self, direction: LossDirection) -> Tensor:
        """The gradient that the candidates of a direction contribute to."""
        grads = self.candidate_queries if direction in QUERY_CANDIDATES else self.documents
        assert grads is not None
        return grads

    def finish(self, rows: Rows, sigma: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Of all inputs of `differentiable`; `sigma` [B] is minus the derivative at the positive's score."""
        scale_grad = (rows.queries.values * self.queries).sum()
        if rows.positives is not None and self.positives is not None:
            scale_grad = scale_grad + (rows.positives.values * self.positives).sum()
        scale_grads = (scale_grad / scale).expand_as(scale).clone()
        return self.queries, self.positives, self.documents, self.candidate_queries, scale_grads, sigma.neg()


class TileBuffer:
    """Memory for tiles, reused: two tiles at a time would double it, and fresh pages cost time."""

    def __init__(self, rows: Rows, width: int) -> None:
        # A tile of texts with several rows has to remember which of them match: it is lower by their number.
        size = rows.queries.max_size
        height = max(MIN_TILE_ROWS // size, TILE_CELLS // max(1, width * size), 1)
        self.row_slices = row_slices(len(rows), height)
        highest = max((end - start for start, end in self.row_slices), default=0)
        self._cells = rows.queries.values.new_empty(highest * width)

    def tiles(self, height: int, widths: Sequence[int]) -> list[Tensor]:
        """Adjacent tiles of these widths; their previous content is lost."""
        sizes = [height * width for width in widths]
        parts = self._cells[: sum(sizes)].split(sizes)
        return [part.view(height, width) for part, width in zip(parts, widths, strict=True)]


class _Tiled(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor | None,
        documents: Tensor,
        candidate_queries: Tensor | None,
        scale: Tensor,
        positive: Tensor,
        rest: tuple[Rows, Candidates, ScoringRules, Partitions],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, candidates, rules, partitions = rest
        grads = Gradients.zeros(rows, candidates)
        sigma_sum, row_losses, loss = torch.zeros_like(positive), torch.zeros_like(positive), positive.new_zeros(())
        row_weights = torch.zeros_like(positive)
        num_correct = torch.zeros((), dtype=torch.int64, device=positive.device)
        widths = [sum(len(candidates.of(direction)) for direction in directions) for directions in partitions]
        buffer = TileBuffer(rows, max(widths))
        for start, end in buffer.row_slices:
            tile_rows, tile_positive = rows.slice(start, end), positive[start:end]
            for directions in partitions:
                tiles = [rules.tile(direction, tile_rows, candidates) for direction in directions]
                cells = buffer.tiles(end - start, [len(candidates.of(direction)) for direction in directions])
                for direction, tile, scores in zip(directions, tiles, cells, strict=True):
                    rules.scores(tile, direction, tile_rows, candidates, scale, out=scores)
                maxima = [row_max(scores) for scores in cells]
                num_correct = add_correct(num_correct, directions, maxima, tile_rows)
                maximum = torch.stack(maxima).amax(dim=0)
                offset = finite(maximum)
                sum_exp = torch.zeros_like(offset)
                for scores in cells:
                    sum_exp += scores.sub_(offset.unsqueeze(1)).exp_().sum(dim=1)
                gap = offset + sum_exp.log() - tile_positive  # -inf in a row without negatives, whose loss is 0
                weight = focal_weights(gap, rules.focal, tile_rows.mixed_losses)
                row_weights[start:end] = weight
                terms = F.softplus(gap) * weight
                loss += terms.sum() / len(partitions)
                row_losses[start:end] += terms / len(partitions)
                sigma = torch.sigmoid(gap) * weight / len(partitions)
                sigma_sum[start:end] += sigma
                weights = (sigma / sum_exp).masked_fill_(sum_exp == 0, 0.0).mul_(scale).unsqueeze(1)
                for direction, tile, exp in zip(directions, tiles, cells, strict=True):
                    anchor_grads = (
                        rows.anchors(direction).with_values(grads.anchors(direction)).slice(start, end).values
                    )
                    tile.add_anchor_grads(anchor_grads, exp, weights)
                    tile.add_candidate_grads(grads.candidates(direction), exp, weights)
        ctx.computed = grads.finish(rows, sigma_sum, scale)
        ctx.mark_non_differentiable(num_correct, row_losses, row_weights)
        return loss, num_correct, row_losses, row_weights


def ring_softmax(
    rows: Rows,
    candidates: Candidates,
    rules: ScoringRules,
    scale: Tensor,
    positive: Tensor,
    partitions: Partitions,
    texts: tuple[Part, Part | None],
    global_rows: GlobalRows,
) -> SoftmaxSums:
    """As `tiled_softmax`, with only this rank's `candidates`; those of other ranks pass by. A collective.

    `texts` are the prepared documents of this rank, and its queries if a direction compares rows with them.
    """
    sums = _Ring.apply(  # type: ignore[no-untyped-call]
        *differentiable(rows, candidates, scale, positive),
        (rows, candidates, rules, partitions, texts, global_rows),
    )
    return SoftmaxSums(*sums)


class _Ring(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor | None,
        documents: Tensor,
        candidate_queries: Tensor | None,
        scale: Tensor,
        positive: Tensor,
        rest: tuple[Rows, Candidates, ScoringRules, Partitions, tuple[Part, Part | None], GlobalRows],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, candidates, rules, partitions, texts, global_rows = rest
        grads = Gradients.zeros(rows, candidates)
        softmaxes = [_OnlineSoftmax(rows, directions) for directions in partitions]
        for passing in _passing_candidates(candidates, rules, texts, global_rows):
            for softmax in softmaxes:
                softmax.add(rows, passing, rules, scale)
        sigma_sum, row_losses, loss = torch.zeros_like(positive), torch.zeros_like(positive), positive.new_zeros(())
        num_correct = torch.zeros((), dtype=torch.int64, device=positive.device)
        row_weights, weight = [], torch.zeros_like(positive)
        for softmax in softmaxes:
            gap = softmax.logsumexp() - positive
            weight = focal_weights(gap, rules.focal, rows.mixed_losses)
            terms = F.softplus(gap) * weight
            loss += terms.sum() / len(partitions)
            row_losses += terms / len(partitions)
            sigma = torch.sigmoid(gap) * weight / len(partitions)
            sigma_sum += sigma
            weights = (sigma / softmax.sum_exp).masked_fill_(softmax.sum_exp == 0, 0.0).mul_(scale)
            for direction, exp_grads in zip(softmax.directions, softmax.exp_grads, strict=True):
                weights_of_rows = rows.anchors(direction).per_row(weights)
                grads.anchors(direction).addcmul_(exp_grads, weights_of_rows.unsqueeze(1))
            row_weights += [softmax.offset(), weights]
            num_correct = add_correct(num_correct, softmax.directions, softmax.maxima, rows)
        for passing_rows, passing_weights in _passing_rows(rows, torch.stack(row_weights, dim=1), global_rows):
            _add_candidate_grads(grads, passing_rows, passing_weights, candidates, rules, scale, partitions)
        ctx.computed = grads.finish(rows, sigma_sum, scale)
        ctx.mark_non_differentiable(num_correct, row_losses, weight)
        return loss, num_correct, row_losses, weight


class _OnlineSoftmax:
    """Of one partition and each row: maximum, sum of exp(score - maximum), and the gradient of that sum."""

    def __init__(self, rows: Rows, directions: Sequence[LossDirection]) -> None:
        self.directions = directions
        self.maximum = torch.full_like(rows.accuracy_thresholds, -torch.inf)
        self.maxima = [self.maximum.clone() for _ in directions]  # of each direction
        self.sum_exp = torch.zeros_like(self.maximum)
        self.exp_grads = [torch.zeros_like(rows.anchors(direction).values) for direction in directions]

    def add(self, rows: Rows, candidates: Candidates, rules: ScoringRules, scale: Tensor) -> None:
        """Add further candidates."""
        for number, direction in enumerate(self.directions):
            columns, anchors = candidates.of(direction), rows.anchors(direction)
            buffer = TileBuffer(rows, len(columns))
            for start, end in buffer.row_slices:
                (cells,) = buffer.tiles(end - start, [len(columns)])
                tile_rows = rows.slice(start, end)
                tile = rules.tile(direction, tile_rows, candidates)
                scores = rules.scores(tile, direction, tile_rows, candidates, scale, out=cells)
                highest = row_max(scores)
                self.maxima[number][start:end] = torch.maximum(self.maxima[number][start:end], highest)
                rescale = add_exp(self.maximum[start:end], self.sum_exp[start:end], scores, highest)
                for exp_grads, of in zip(self.exp_grads, self.directions, strict=True):
                    part = rows.anchors(of).with_values(exp_grads).slice(start, end)
                    part.values.mul_(part.per_row(rescale).unsqueeze(1))
                grads = anchors.with_values(self.exp_grads[number]).slice(start, end).values
                tile.add_anchor_grads(grads, scores, torch.ones_like(rescale).unsqueeze(1))

    def offset(self) -> Tensor:
        """Subtracted from scores before their exp."""
        return finite(self.maximum)

    def logsumexp(self) -> Tensor:
        """-inf for a row without negatives."""
        return self.offset() + self.sum_exp.log()


def _passing_candidates(
    local: Candidates, rules: ScoringRules, texts: tuple[Part, Part | None], global_rows: GlobalRows
) -> Iterator[Candidates]:
    """Every rank's candidates, beginning with this rank's."""
    documents, queries = texts
    counts, sizes = global_rows.counts, global_rows.part_sizes
    travelling = [(documents, sizes.documents, counts.documents)]
    if queries is not None:
        travelling.append((queries, sizes.queries, counts.queries))
    of_guide = {
        "guide_documents": (local.guide_documents, counts.documents),
        "guide_queries": (local.guide_queries, counts.queries),
    }
    guides = {name: (Part(values), None, of) for name, (values, of) in of_guide.items() if values is not None}
    for rank, (passing, *others) in passing_parts(*zip(*travelling, *guides.values(), strict=True)):
        yield Candidates(
            first_query=sum(counts.queries[:rank]),
            first_document=sum(counts.documents[:rank]),
            documents=rules.score.columns(passing),
            queries=None if queries is None else rules.score.columns(others.pop(0)),
            **{name: part.values for name, part in zip(guides, others, strict=True)},
        )


def _passing_rows(local: Rows, weights: Tensor, global_rows: GlobalRows) -> Iterator[tuple[Rows, Tensor]]:
    """Every rank's rows with their weights, beginning with this rank's."""
    # One row each: only vectors are compared with queries.
    positives = [] if local.positives is None else [local.positives]
    named = {name: Part(value) for name, value in local.tensors().items() if value is not None}
    parts = [local.queries, Part(weights), *positives, *named.values()]
    sizes = [global_rows.part_sizes.queries, *[None] * (len(parts) - 1)]
    for passing in passing_texts(parts, sizes, global_rows.counts.queries):
        queries, passing_weights, *others = passing.parts
        rows = Rows(
            first=passing.first,
            queries=queries,
            positives=others.pop(0) if positives else None,
            **{name: part.values for name, part in zip(named, others, strict=True)},
        )
        yield rows, passing_weights.values


def _add_candidate_grads(
    grads: Gradients,
    rows: Rows,
    row_weights: Tensor,
    local: Candidates,
    rules: ScoringRules,
    scale: Tensor,
    partitions: Partitions,
) -> None:
    """Add one rank's rows to the gradient of this rank's candidates.

    `row_weights` [c, 2 P] has, for each partition, the offset subtracted from scores and the factor of their exp.
    """
    for number, directions in enumerate(partitions):
        for direction in directions:
            buffer = TileBuffer(rows, len(local.of(direction)))
            for start, end in buffer.row_slices:
                tile_rows = rows.slice(start, end)
                (cells,) = buffer.tiles(end - start, [len(local.of(direction))])
                tile = rules.tile(direction, tile_rows, local)
                scores = rules.scores(tile, direction, tile_rows, local, scale, out=cells)
                offset, weights = row_weights[start:end, 2 * number : 2 * number + 2].unsqueeze(1).unbind(2)
                tile.add_candidate_grads(grads.candidates(direction), scores.sub_(offset).exp_(), weights)
