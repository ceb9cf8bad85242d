"""Triplet losses: of the rows' own triplets, or of triplets mined by the rows' classes.

B: rows of this rank; A: those of them in one chunk; N: rows of all ranks; M: documents of this rank; D: dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedtrain.config.loss_choices import Distance, TripletMining
from embedtrain.config.losses import BatchTripletConfig, TripletConfig
from embedtrain.distributed.collectives import gather_rows, sum_over_ranks
from embedtrain.losses.similarity import (
    at_least_float32,
    distance_matrix,
    pairwise_distance,
    positions_in_row,
    rows_per_chunk,
    sum_by_row,
)
from embedtrain.losses.types import BatchInfo, Loss, LossOutput

# Matrices [A, N] that live at a time in the backward pass of a chunk, approximately.
_LIVE_MATRICES = 12
_BLOCK = 64  # columns per block of `_running_sums`


class Triplet(Loss):
    """Schroff et al., "FaceNet: A Unified Embedding for Face Recognition and Clustering" (CVPR 2015).

    Each hard negative n of a row with query q and positive p forms a triplet; the mean over all triplets of
    relu(d(q, p) - d(q, n) + margin). Logs `accuracy`, the fraction of triplets whose negative is farther.
    """

    def __init__(self, config: TripletConfig) -> None:
        super().__init__()
        self.margin, self.distance = config.margin, config.distance or Distance.cosine

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] to this rank's loss."""
        distances = pairwise_distance(
            at_least_float32(queries)[batch_info.owners], at_least_float32(documents), self.distance
        )
        positions, negatives = positions_in_row(batch_info.owners), batch_info.negatives
        near, far = distances[negatives - positions[negatives]], distances[negatives]
        num_triplets = max(1, batch_info.rows.num_negatives)
        terms = F.relu(near - far + self.margin)
        by_row = sum_by_row(terms, batch_info.owners[negatives], len(queries)) / num_triplets
        return LossOutput(terms.sum() / num_triplets, {"accuracy": (far > near).sum() / num_triplets}, by_row)


class BatchTriplet(Loss):
    """Hermans et al., "In Defense of the Triplet Loss for Person Re-Identification" (2017); semi-hard: FaceNet.

    Each row is one text, the query, with a class. Rows of the anchor's class anywhere in the global batch are its
    positives and all others its negatives. An anchor without positive or without negative does not count. With the
    distance d, the mean of relu(d(positive) - d(negative) + margin)

    - all: over the triplets for which it is above 0;
    - hard: over the anchors, each with its farthest positive and nearest negative;
    - hard_soft_margin: the same with softplus(d(positive) - d(negative)) instead;
    - semi_hard: over the pairs of an anchor and a positive, with the nearest negative that is farther than
      the positive, or the farthest negative where none is.

    Logs `active`: the fraction of triplets (all), anchors (hard) or pairs (semi_hard) above 0; with a soft margin,
    of anchors whose nearest negative is no farther than their farthest positive.
    """

    def __init__(self, config: BatchTripletConfig) -> None:
        super().__init__()
        self.mining, self.margin = config.mining, config.margin
        self.distance = config.distance or Distance.cosine

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] with labels [B] to this rank's loss; there are no documents."""
        assert batch_info.labels is not None, "the data layer gives every row a class, see config/row_requirements.py"
        anchors = at_least_float32(queries)
        if self.distance is Distance.cosine:
            anchors = F.normalize(anchors, dim=1)
        counts = batch_info.rows.counts.queries
        candidates, classes = gather_rows(anchors, counts), gather_rows(batch_info.labels, counts)
        indices = torch.arange(len(anchors), device=anchors.device) + batch_info.rows.local_rows.start

        # The zero terms connect a rank without rows to the gather, whose backward pass needs every rank, and the
        # empty documents to the graph.
        loss_sum = 0.0 * (candidates.sum() + documents.sum())
        num_active, num_possible = (torch.zeros((), dtype=torch.float64, device=anchors.device) for _ in range(2))
        # The backward pass of torch.cdist holds every difference on a GPU, [A, N, D].
        wide = 1 if self.distance is Distance.cosine else anchors.shape[1]
        size = rows_per_chunk(len(candidates) * max(_LIVE_MATRICES, wide), anchors.dtype)
        for chunk, chunk_indices in zip(anchors.split(size), indices.split(size), strict=True):
            if len(chunk) == 0:
                continue
            chunk_sum, active, possible = checkpoint(
                self._chunk, chunk, chunk_indices, candidates, classes, use_reentrant=False, preserve_rng_state=False
            )
            loss_sum, num_active, num_possible = loss_sum + chunk_sum, num_active + active, num_possible + possible
        all_active, all_possible = sum_over_ranks(torch.stack([num_active, num_possible])).clamp(min=1)
        divisor = all_active if self.mining is TripletMining.all else all_possible
        return LossOutput(loss_sum / divisor.to(loss_sum.dtype), {"active": num_active / all_possible})

    def _chunk(
        self, anchors: Tensor, indices: Tensor, candidates: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Anchors [A, D], rows `indices` [A] of the candidates [N, D]: sum of losses, numbers active and possible."""
        distances = distance_matrix(anchors, candidates, self.distance)
        same_class = classes[indices].unsqueeze(1) == classes
        negative = ~same_class
        positive = same_class.scatter(1, indices.unsqueeze(1), False)
        # Rows that are no anchors lose their pairs and stay: the host does not know how many anchors there are.
        is_anchor = (positive.any(dim=1) & negative.any(dim=1)).unsqueeze(1)
        positive, negative = positive & is_anchor, negative & is_anchor
        match self.mining:
            case TripletMining.all:
                return self._all(distances, positive, negative)
            case TripletMining.hard | TripletMining.hard_soft_margin:
                return self._hard(distances, positive, negative)
            case TripletMining.semi_hard:
                return self._semi_hard(distances, positive, negative)

    def _all(self, distances: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorted by distance, an anchor's negatives within the margin of a positive come first.

        So the sum of their distances is a running sum, and N log N steps per anchor suffice instead of N^2.
        """
        nearest = distances.masked_fill(~negative, torch.inf).sort(dim=1).values
        # Zeros in place of non-negatives; float64, since float32 is too coarse for running sums over thousands of rows.
        running = _running_sums(nearest.masked_fill(nearest.isinf(), 0.0).double())
        reach = distances + self.margin
        within = torch.searchsorted(nearest.detach(), reach.detach().contiguous())
        terms = within * reach.double() - running.gather(1, within)
        return (
            terms.masked_fill(~positive, 0.0).sum().to(distances.dtype),
            within.masked_fill(~positive, 0).sum().double(),
            (positive.sum(dim=1) * negative.sum(dim=1)).sum().double(),
        )

    def _hard(self, distances: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        farthest = distances.masked_fill(~positive, -torch.inf).max(dim=1).values
        nearest = distances.masked_fill(~negative, torch.inf).min(dim=1).values
        num_anchors = positive.any(dim=1).sum().double()
        gaps = farthest - nearest  # -inf without pairs, which adds 0
        if self.mining is TripletMining.hard_soft_margin:
            return F.softplus(gaps).sum(), (gaps >= 0).sum().double(), num_anchors
        return F.relu(gaps + self.margin).sum(), (gaps + self.margin > 0).sum().double(), num_anchors

    def _semi_hard(self, distances: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nearest = distances.masked_fill(~negative, torch.inf).sort(dim=1).values
        farther = torch.searchsorted(nearest.detach(), distances.detach().contiguous(), right=True)
        # Negatives come first in `nearest`, so the last of them is the farthest.
        last = (negative.sum(dim=1, keepdim=True) - 1).clamp(min=0)
        chosen = nearest.gather(1, torch.minimum(farther, last))
        gaps = (distances - chosen + self.margin).masked_fill(~positive, -torch.inf)
        return F.relu(gaps).sum(), (gaps > 0).sum().double(), positive.sum().double()


def _running_sums(values: Tensor) -> Tensor:
    """Sums of the first 0, 1, ..., N values of each row: [R, N] becomes [R, N + 1].

    By matrix products within blocks and over blocks, because torch has no deterministic cumsum on a GPU.
    """
    width = values.shape[1]
    blocks = F.pad(values, (0, -width % _BLOCK)).unflatten(1, (-(-width // _BLOCK), _BLOCK))
    within = blocks @ blocks.new_ones(_BLOCK, _BLOCK).triu()
    totals = within[..., -1]
    before = totals @ totals.new_ones(totals.shape[1], totals.shape[1]).triu(1)
    return F.pad((within + before.unsqueeze(2)).flatten(1)[:, :width], (1, 0))
