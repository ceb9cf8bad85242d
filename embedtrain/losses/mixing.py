"""Negatives that are mixed from the vectors of a row's own hard negatives (Zhang et al., 2025, "KaLM-Embedding-V2").

Every row has mixed negatives of its own, so nothing is communicated. With the logsumexp e_i of their scores, the loss
of InfoNCE is log(exp(p_i) + exp(e_i) + sum_j exp(z_ij)) - p_i = softplus(lse_j z_ij - p_i - b_i) + b_i, where
b_i = softplus(e_i - p_i): each implementation of the softmax computes it from another positive score, p_i + b_i.

B, M: queries and documents of this rank; P: pairs of a row; S: mixed negatives of a row; D: dimensions.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.losses import Hardness, InfoNCEConfig
from embedtrain.losses.encoded import to_device
from embedtrain.losses.similarity import group_logsumexp
from embedtrain.losses.types import BatchInfo, GlobalRows

# The finaliser of splitmix64, a permutation of the 64-bit integers.
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDocuments:
    """The rows of this rank with their own documents."""

    queries: Tensor  # [B, D], of unit length
    documents: Tensor  # [M, D]
    scores: Tensor  # [M], of each document and its row's query, divided by the temperature, without gradient
    excluded: Tensor  # bool [M], positives and documents that are no negatives


def mixed_losses(
    own: OwnDocuments, positive: Tensor, scale: Tensor, limits: Tensor | None, config: InfoNCEConfig, draws: "Draws"
) -> Tensor:
    """The loss b [B] of a softmax of the positive and the mixed negatives; 0 for a row without any.

    `positive` [B] and `scale` [1] as for `plain_softmax`; `limits` [B] are the scores beyond which none is a negative.
    """
    mixed, missing = _mix(own, draws, with_list=config.mixed_list)
    similarity = (own.queries.unsqueeze(1) * mixed).sum(dim=2)
    scores = similarity * scale
    if limits is not None:
        missing = missing | (scores.detach() > limits.unsqueeze(1))
    if config.hardness in (Hardness.hard, Hardness.all):
        scores = scores + config.hardness_strength * similarity.detach()
    none = missing.all(dim=1)
    # Finite scores make the gradient of a row without mixed negatives 0 instead of NaN.
    lse = scores.masked_fill(missing, -torch.inf).masked_fill(none.unsqueeze(1), 0.0).logsumexp(dim=1)
    return F.softplus((lse - positive).masked_fill(none, -torch.inf))


@dataclass(frozen=True, slots=True)
class Draws:
    """Pairs of different hard negatives of each row, and the fraction of the first one in their mixture."""

    first: Tensor  # int64 [B, P], index of a document of this rank
    second: Tensor  # int64 [B, P]
    fraction: Tensor  # float64 [B, P], of the distribution Beta(2, 2)
    owners: Tensor  # int64 [M], as in BatchInfo
    exist: Tensor  # bool [B, 1], whether a row has two hard negatives

    @classmethod
    def of(cls, batch_info: BatchInfo, num_pairs: int, seed: int) -> "Draws":
        """A function of the seed, the batch, the row's texts and the number of its negatives, not of ranks."""
        rows = batch_info.rows
        counts = rows.local_num_documents[:, None] - 1
        starts = rows.local_positives[:, None]
        uniform = _uniform(rows, num_pairs, seed, batch_info.origin.batch)
        first = (uniform[0] * counts).astype(np.int64)
        others = np.maximum(counts - 1, 1)
        second = (first + 1 + (uniform[1] * others).astype(np.int64)) % np.maximum(counts, 1)
        exist = counts >= 2
        device = batch_info.owners.device
        return cls(
            first=to_device(np.where(exist, starts + 1 + first, starts), device),
            second=to_device(np.where(exist, starts + 1 + second, starts), device),
            # The median of three uniform numbers has the density 6 x (1 - x).
            fraction=to_device(np.median(uniform[2:], axis=0), device),
            owners=batch_info.owners,
            exist=to_device(exist, device),
        )


def _mix(own: OwnDocuments, draws: Draws, *, with_list: bool) -> tuple[Tensor, Tensor]:
    """Mixtures of unit length, [B, S, D], and which of them have an excluded document or too few, bool [B, S]."""
    documents, excluded, owners = own.documents, own.excluded, draws.owners
    fraction = draws.fraction.to(documents.dtype).unsqueeze(2)
    mixtures = [fraction * documents[draws.first] + (1 - fraction) * documents[draws.second]]
    missing = [excluded[draws.first] | excluded[draws.second] | ~draws.exist]
    if with_list:
        scores = own.scores.masked_fill(excluded, -torch.inf)
        weights = (scores - group_logsumexp(scores, owners, len(own.queries))[owners]).exp()
        mixed = torch.zeros_like(own.queries).index_add(0, owners, weights.unsqueeze(1) * documents)
        count = torch.zeros_like(own.queries[:, 0]).index_add_(0, owners, (~excluded).to(documents.dtype))
        mixtures.append(mixed.unsqueeze(1))
        missing.append((count < 2).unsqueeze(1))  # of one, it would be a copy
    return F.normalize(torch.cat(mixtures, dim=1), dim=2), torch.cat(missing, dim=1)


def _uniform(rows: GlobalRows, num_pairs: int, seed: int, step: int) -> NDArray[np.float64]:
    """Pseudo-random numbers from 0 to 1 (excluded), [5, B, P], by hashing the keys of a row's query and positive."""
    queries = slice(rows.local_rows.start, rows.local_rows.stop)
    positives = rows.document_keys[rows.first_documents[queries]]
    state: NDArray[np.uint64] = np.zeros((len(positives), 1), dtype=np.uint64)
    for key in (np.array([seed]), np.array([step]), rows.query_keys[queries], positives):
        column: NDArray[np.uint64] = key.astype(np.uint64).reshape(-1, 1)
        state = _hash(state + column)
    offsets: NDArray[np.uint64] = np.arange(5 * num_pairs).astype(np.uint64)
    numbers = _hash(state + offsets)
    values = (numbers >> np.uint64(11)).astype(np.float64) / 2**53
    return values.reshape(len(positives), 5, num_pairs).transpose(1, 0, 2)


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values + np.uint64(1)) * _INCREMENT
    for shift, factor in _STEPS:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))
