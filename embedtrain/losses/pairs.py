"""Losses of scored pairs, and of triplets: of the rows' own ones, or mined by the rows' classes.

A pair is a document and its row's query, and has a score; ranks exchange only the scalars of pairs.

B, M: queries and documents, so pairs, of this rank; A: queries of one chunk; N: rows of all ranks; P: pairs of all
ranks; D: dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedtrain.config.losses import (
    AnglEConfig,
    BatchTripletConfig,
    ContrastiveConfig,
    CoSENTConfig,
    CosineMSEConfig,
    Distance,
    OnlineContrastiveConfig,
    Reduction,
    Similarity,
    TripletConfig,
    TripletMining,
)
from embedtrain.distributed.collectives import gather_rows, sum_over_ranks
from embedtrain.losses.similarity import (
    at_least_float32,
    distance_matrix,
    pairwise_distance,
    pairwise_similarity,
    positions_in_row,
    rows_per_chunk,
    sum_by_row,
)
from embedtrain.losses.types import BatchInfo, Loss, LossOutput

# Matrices [A, N] that live at a time in the backward pass of a chunk, approximately.
_LIVE_MATRICES = 12
_BLOCK = 64  # columns per block of `_running_sums`


class CoSENT(Loss):
    """Su, "CoSENT: A more efficient sentence vector scheme than Sentence-BERT" (kexue.fm/archives/8847, 2022).

    log(1 + sum of exp((s_i - s_j) / temperature)) over all ordered pairs i, j of the P pairs in which j has
    the higher score; s is the cosine. Pairs of equal scores are not ordered.
    """

    def __init__(self, config: CoSENTConfig | AnglEConfig) -> None:
        super().__init__()
        self.temperature = config.temperature

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with scores [M] to this rank's loss."""
        left, right, scores = _pairs(queries, documents, batch_info)
        return LossOutput(
            _ranking_loss(self._similarity(left, right) / self.temperature, scores, batch_info.rows.counts.documents)
        )

    def _similarity(self, left: Tensor, right: Tensor) -> Tensor:
        return pairwise_similarity(left, right, Similarity.cosine)


class AnglE(CoSENT):
    """Li and Li, "AoE: Angle-Optimized Embeddings for Semantic Textual Similarity" (ACL 2024).

    CoSENT's loss with another similarity. A vector's halves are the real and the imaginary parts of D/2
    complex numbers (an odd D is padded by a zero), and s is the magnitude of the sum of the real and the
    imaginary part of their inner product, both vectors at length 1.
    """

    def _similarity(self, left: Tensor, right: Tensor) -> Tensor:
        odd = left.shape[1] % 2
        left, right = (F.pad(F.normalize(vectors, dim=1), (0, odd)) for vectors in (left, right))
        (real, imaginary), (other_real, other_imaginary) = left.chunk(2, dim=1), right.chunk(2, dim=1)
        sines = (imaginary * other_real - real * other_imaginary).sum(dim=1)
        return ((left * right).sum(dim=1) + sines).abs()


class CosineMSE(Loss):
    """Reimers and Gurevych, "Sentence-BERT" (EMNLP 2019): the mean over all pairs of (cosine - score)^2."""

    def __init__(self, config: CosineMSEConfig) -> None:
        super().__init__()

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with scores [M] to this rank's loss."""
        left, right, scores = _pairs(queries, documents, batch_info)
        terms = (pairwise_similarity(left, right, Similarity.cosine) - scores).square()
        num_pairs = max(1, sum(batch_info.rows.counts.documents))
        by_row = sum_by_row(terms, batch_info.owners, len(queries)) / num_pairs
        return LossOutput(terms.sum() / num_pairs, row_losses=by_row)


class Contrastive(Loss):
    """Hadsell et al., "Dimensionality Reduction by Learning an Invariant Mapping" (CVPR 2006).

    The mean over all pairs of (y d^2 + (1 - y) relu(margin - d)^2) / 2 for a pair of score y at distance d.
    """

    def __init__(self, config: ContrastiveConfig) -> None:
        super().__init__()
        self.margin, self.distance = config.margin, config.distance or Distance.cosine

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with scores [M] to this rank's loss."""
        left, right, scores = _pairs(queries, documents, batch_info)
        distances = pairwise_distance(left, right, self.distance)
        terms = (scores * distances.square() + (1 - scores) * F.relu(self.margin - distances).square()) / 2
        num_pairs = max(1, sum(batch_info.rows.counts.documents))
        by_row = sum_by_row(terms, batch_info.owners, len(queries)) / num_pairs
        return LossOutput(terms.sum() / num_pairs, row_losses=by_row)


class OnlineContrastive(Loss):
    """The contrastive loss of only the hard pairs of the global batch (sentence-transformers' OnlineContrastiveLoss).

    Hard pairs are negatives (score 0) nearer than the farthest positive, and positives (score 1) farther
    than the nearest negative; without the other kind, those beyond the mean of their own. Pairs of any other
    score do not count. The sum of d^2 and of relu(margin - d)^2, divided by the number of all pairs P for
    `reduction=mean`. Logs `hard_pairs`, the fraction of pairs that are hard.
    """

    def __init__(self, config: OnlineContrastiveConfig) -> None:
        super().__init__()
        self.margin, self.reduction = config.margin, config.reduction
        self.distance = config.distance or Distance.cosine

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with scores [M] to this rank's loss."""
        left, right, scores = _pairs(queries, documents, batch_info)
        distances = pairwise_distance(left, right, self.distance)
        counts = batch_info.rows.counts.documents
        all_distances, all_scores = gather_rows(distances.detach(), counts), gather_rows(scores, counts)
        # Padded, since torch has no maximum of an empty tensor.
        positives, negatives = all_scores == 1, all_scores == 0
        farthest = F.pad(all_distances.masked_fill(~positives, -torch.inf), (0, 1), value=-torch.inf).max()
        nearest = F.pad(all_distances.masked_fill(~negatives, torch.inf), (0, 1), value=torch.inf).min()
        # Without either kind, its mean is NaN, but then there is nothing to compare with it.
        nearer_than = torch.where(positives.any(), farthest, _mean(all_distances, negatives))
        farther_than = torch.where(negatives.any(), nearest, _mean(all_distances, positives))
        hard_negative = (scores == 0) & (distances.detach() < nearer_than)
        hard_positive = (scores == 1) & (distances.detach() > farther_than)
        terms = hard_positive * distances.square() + hard_negative * F.relu(self.margin - distances).square()
        num_pairs = max(1, sum(counts))
        loss = terms.sum() if self.reduction is Reduction.sum else terms.sum() / num_pairs
        return LossOutput(loss, {"hard_pairs": (hard_negative | hard_positive).sum() / num_pairs})


def _pairs(queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> tuple[Tensor, Tensor, Tensor]:
    """Each document's query [M, D], the documents [M, D], their scores [M]."""
    assert batch_info.scores is not None, "the data layer gives every document a score, see RowRequirements"
    documents = at_least_float32(documents)
    return at_least_float32(queries)[batch_info.owners], documents, batch_info.scores.to(documents.dtype)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of the values [P] that are counted, bool [P]."""
    return values.masked_fill(~counted, 0.0).sum() / counted.sum()


def _ranking_loss(similarity: Tensor, scores: Tensor, counts: list[int]) -> Tensor:
    """This rank's part of log(1 + sum over i, j with score_i < score_j of exp(similarity_i - similarity_j)).

    Sorted by score, the sum over j runs from some index to the end, so P log P steps suffice. Every rank computes
    the whole from the gathered scalars; its part is 1/W of it.
    """
    scores, order = gather_rows(scores, counts).sort()
    similarity = gather_rows(similarity, counts)[order]
    higher = torch.searchsorted(scores, scores, right=True)
    # Two equal rows, because torch scans a single row on a GPU in an order that differs between runs.
    suffix_sums = torch.logcumsumexp(-similarity.flip(0).expand(2, -1), dim=1)[0].flip(0)
    suffix_sums = torch.cat([suffix_sums, similarity.new_full((1,), -torch.inf)])
    terms = similarity + suffix_sums[higher]
    return torch.logsumexp(torch.cat([similarity.new_zeros(1), terms]), dim=0) / len(counts)


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
