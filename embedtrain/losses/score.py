"""How two texts compare. Losses read scores through `Score` alone, so that one loss trains every kind of model.

B, M: queries and documents of this rank; c, t: anchors and candidates of one tile; D: dimensions.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from embedtrain.config.losses import Similarity
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.similarity import at_least_float32, pairwise_similarity


class Score(ABC):
    """The score of a query and a document, from what the encoder computes of them."""

    @abstractmethod
    def pairs(self, queries: Encoded, documents: Encoded, owners: Tensor) -> Tensor:
        """The score of each document and its query: [M], float32 or float64, differentiable.

        `owners`, int64 [M], is the index of the query that a document belongs to.
        """


class VectorScore(Score):
    """The similarity of one vector of the query and one of the document.

    The softmax over the documents of all ranks works in tiles: `tile` computes the scores of some anchors and all
    candidates, `anchor_grads` and `candidate_grads` lead the gradient of a tile back to the vectors.
    """

    def __init__(self, similarity: Similarity) -> None:
        self.similarity = similarity

    def pairs(self, queries: Encoded, documents: Encoded, owners: Tensor) -> Tensor:
        """The similarity of the vectors [B, D] and [M, D]."""
        left, right = at_least_float32(queries.vectors)[owners], at_least_float32(documents.vectors)
        return pairwise_similarity(left, right, self.similarity)

    @staticmethod
    def tile(anchors: Tensor, candidates: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
        """Inner products of [c, D] and [t, D], times `scale`: [c, t]. Differentiable, except with the buffer `out`."""
        return torch.mm(anchors * scale, candidates.T, out=out)

    @staticmethod
    def add_anchor_grads(grads: Tensor, tile_grads: Tensor, candidates: Tensor, weights: Tensor) -> None:
        """Add the gradient of the anchors [c, D]: that of their tile [c, t], with row i multiplied by weights[i]."""
        grads.addcmul_(tile_grads @ candidates, weights)

    @staticmethod
    def add_candidate_grads(grads: Tensor, tile_grads: Tensor, anchors: Tensor, weights: Tensor) -> None:
        """Add the gradient of the candidates [t, D] likewise."""
        grads.addmm_(tile_grads.T, anchors * weights)


class PairScore(Score):
    """The scores themselves, which a cross-encoder computes: it encodes no queries, and its documents are pairs."""

    def pairs(self, queries: Encoded, documents: Encoded, owners: Tensor) -> Tensor:
        """The scores [M, 1] as [M]."""
        return at_least_float32(documents.vectors).squeeze(1)
