"""Scores of rows against candidates: which candidates count as negatives, and what they score.

B: rows of this rank; c, t: rows and candidates of one tile; T: dimensions of the guide's vectors.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from embedtrain.config.loss_choices import Hardness, LossDirection, MarginKind
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.losses.encoded import Part
from embedtrain.losses.excluded import QUERY_ANCHORS, QUERY_CANDIDATES, ExcludedCandidates
from embedtrain.losses.score import Columns, ScoreTile, TiledScore
from embedtrain.losses.similarity import rounding_tolerance


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


def score_limits(
    similarity: Tensor, tolerance: Tensor, scale: Tensor, config: InfoNCEConfig
) -> tuple[Tensor, Tensor | None]:
    """`accuracy_thresholds` and `score_limits` of `Rows`, from the positives' scores and their rounding errors [B]."""
    margin = config.false_negative_margin
    limits = None if margin is None else (similarity + margin + tolerance) * scale
    return (similarity - config.margin - tolerance) * scale, limits


def guide_limits(positive: Tensor, config: InfoNCEConfig) -> Tensor:
    """From the guide's similarities of the positives [c]: the similarity above which it rejects a negative."""
    scale = positive.abs() if config.guide_margin_kind is MarginKind.relative else 1.0
    return positive - config.guide_margin * scale + rounding_tolerance(positive)
