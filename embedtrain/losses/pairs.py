"""Losses of scored pairs: CoSENT, AnglE, CosineMSE, Contrastive and OnlineContrastive.

Each document forms a pair with its row's query, and each pair has a score. B, M: queries and documents, so
pairs, of this rank; P: pairs of all ranks; D: dimensions. Ranks exchange only the pairs' scalars.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.loss_choices import Distance, Reduction, Similarity
from embedtrain.config.losses import (
    AnglEConfig,
    ContrastiveConfig,
    CoSENTConfig,
    CosineMSEConfig,
    OnlineContrastiveConfig,
)
from embedtrain.distributed.collectives import gather_rows
from embedtrain.losses.similarity import at_least_float32, pairwise_distance, pairwise_similarity, sum_by_row
from embedtrain.losses.types import BatchInfo, Loss, LossOutput


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
    assert batch_info.scores is not None, "the data layer gives every document a score, see config/row_requirements.py"
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
