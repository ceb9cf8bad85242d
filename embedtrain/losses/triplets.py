"""Losses of an anchor, a positive and a negative: the rows' own triplets, or those found by the rows' classes.

B: rows of this rank; A: those of them in one chunk; N: rows of all ranks; M: documents of this rank; D: dimensions.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedtrain.config.losses import BatchTripletConfig, Distance, TripletConfig, TripletMining
from embedtrain.distributed.collectives import gather_rows, row_counts, sum_over_ranks, total
from embedtrain.losses.similarity import all_distances, distances, places_in_row, rows_at_once, widened
from embedtrain.losses.types import BatchInfo, Loss, LossOutput

# About so many matrices [A, N] of a chunk live at a time, in its backward pass.
_LIVE_MATRICES = 12


class Triplet(Loss):
    """Schroff et al., "FaceNet: A Unified Embedding for Face Recognition and Clustering" (CVPR 2015).

    Each hard negative n of a row with query q and positive p makes a triplet; the mean over all of them of
    relu(d(q, p) - d(q, n) + margin). Logs `accuracy`, the share of triplets whose negative is farther.
    """

    def __init__(self, config: TripletConfig) -> None:
        super().__init__()
        self.margin, self.distance = config.margin, config.distance

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] to this rank's share."""
        apart = distances(widened(queries)[batch_info.owners], widened(documents), self.distance)
        places = places_in_row(batch_info.owners)
        negatives = places.nonzero().squeeze(1)
        near, far = apart[negatives - places[negatives]], apart[negatives]
        num_triplets = max(1, total(len(negatives), apart.device))
        local_loss = F.relu(near - far + self.margin).sum() / num_triplets
        return LossOutput(local_loss, {"accuracy": (far > near).sum() / num_triplets})


class BatchTriplet(Loss):
    """Hermans et al., "In Defense of the Triplet Loss for Person Re-Identification" (2017); semi-hard: FaceNet.

    Each row is one text, the query, with a class. Rows of the anchor's class are its positives and all others
    its negatives, wherever in the global batch they stand. An anchor without positive or without negative does
    not count. With the distance d, the mean of relu(d(positive) - d(negative) + margin)

    - all: over the triplets for which it is above 0;
    - hard: over the anchors, each with its farthest positive and nearest negative;
    - hard_soft_margin: the same with softplus(d(positive) - d(negative)) instead;
    - semi_hard: over the pairs of an anchor and a positive, with the nearest negative that is farther than
      the positive, or the farthest negative where none is.

    Logs `active`: how many of the triplets (all), anchors (hard) or pairs (semi_hard) are above 0; with a soft
    margin, how many anchors have their nearest negative no farther than their farthest positive.
    """

    def __init__(self, config: BatchTripletConfig) -> None:
        super().__init__()
        self.mining, self.margin, self.distance = config.mining, config.margin, config.distance

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] with labels [B] to this rank's share; there are no documents."""
        assert batch_info.labels is not None, "the data layer gives every row a class, see config/needs.py"
        anchors = widened(queries)
        if self.distance is Distance.cosine:
            anchors = F.normalize(anchors, dim=1)
        counts = row_counts(len(anchors), anchors.device)
        candidates, classes = gather_rows(anchors, counts), gather_rows(batch_info.labels, counts)
        numbers = torch.arange(len(anchors), device=anchors.device) + sum(counts[: dist.get_rank()])

        # The zero terms tie a rank without rows to the gather, whose backward pass needs every rank, and a
        # batch without documents to what it was given.
        summed = 0.0 * (candidates.sum() + documents.sum())
        num_active, num_possible = (torch.zeros((), dtype=torch.float64, device=anchors.device) for _ in range(2))
        # The backward pass of torch.cdist holds every difference on a GPU, [A, N, D].
        wide = 1 if self.distance is Distance.cosine else anchors.shape[1]
        size = rows_at_once(len(candidates) * max(_LIVE_MATRICES, wide), anchors.dtype)
        for some, some_numbers in zip(anchors.split(size), numbers.split(size), strict=True):
            if len(some) == 0:
                continue
            part, active, possible = checkpoint(
                self._mine, some, some_numbers, candidates, classes, use_reentrant=False, preserve_rng_state=False
            )
            summed, num_active, num_possible = summed + part, num_active + active, num_possible + possible
        all_active, all_possible = sum_over_ranks(torch.stack([num_active, num_possible])).clamp(min=1)
        counted = all_active if self.mining is TripletMining.all else all_possible
        return LossOutput(summed / counted.to(summed.dtype), {"active": num_active / all_possible})

    def _mine(
        self, anchors: Tensor, numbers: Tensor, candidates: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Anchors [A, D], rows `numbers` [A] of the candidates [N, D]: the sum, how much is active, of how much."""
        apart = all_distances(anchors, candidates, self.distance)
        alike = classes[numbers].unsqueeze(1) == classes
        negative = ~alike
        positive = alike.scatter(1, numbers.unsqueeze(1), False)
        counting = positive.any(dim=1) & negative.any(dim=1)
        apart, positive, negative = apart[counting], positive[counting], negative[counting]
        match self.mining:
            case TripletMining.all:
                return self._all(apart, positive, negative)
            case TripletMining.hard | TripletMining.hard_soft_margin:
                return self._hard(apart, positive, negative)
            case TripletMining.semi_hard:
                return self._semi_hard(apart, positive, negative)

    def _all(self, apart: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In the order of an anchor's negatives, those within the margin of a positive are the first ones.

        So their distances' sum is a running sum, and N log N steps an anchor do instead of N^2.
        """
        nearest = apart.masked_fill(~negative, torch.inf).sort(dim=1).values
        # Padded by zeros where nothing stands; a running sum over thousands of rows is no place for float32.
        running = F.pad(nearest.masked_fill(nearest.isinf(), 0.0).double().cumsum(dim=1), (1, 0))
        reach = apart + self.margin
        within = torch.searchsorted(nearest.detach(), reach.detach().contiguous())
        terms = within * reach.double() - running.gather(1, within)
        return (
            terms[positive].sum().to(apart.dtype),
            within[positive].sum().double(),
            (positive.sum(dim=1) * negative.sum(dim=1)).sum().double(),
        )

    def _hard(self, apart: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        farthest = apart.masked_fill(~positive, -torch.inf).max(dim=1).values
        nearest = apart.masked_fill(~negative, torch.inf).min(dim=1).values
        num_anchors = apart.new_tensor(len(apart), dtype=torch.float64)
        gaps = farthest - nearest
        if self.mining is TripletMining.hard_soft_margin:
            return F.softplus(gaps).sum(), (gaps >= 0).sum().double(), num_anchors
        return F.relu(gaps + self.margin).sum(), (gaps + self.margin > 0).sum().double(), num_anchors

    def _semi_hard(self, apart: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nearest = apart.masked_fill(~negative, torch.inf).sort(dim=1).values
        farther = torch.searchsorted(nearest.detach(), apart.detach().contiguous(), right=True)
        # The negatives are the first ones of `nearest`, so the last of them is the farthest.
        chosen = nearest.gather(1, torch.minimum(farther, negative.sum(dim=1, keepdim=True) - 1))
        gaps = (apart - chosen)[positive] + self.margin
        return F.relu(gaps).sum(), (gaps > 0).sum().double(), positive.sum().double()
