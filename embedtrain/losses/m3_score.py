"""The score of two texts with three representations (BGE-M3): the weighted sum of three scores.

R: rows of texts; M: documents; N: texts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.loss_choices import Similarity
from embedtrain.config.m3 import M3Settings
from embedtrain.losses.encoded import Encoded, Part, to_device
from embedtrain.losses.lexical import compare_lexical
from embedtrain.losses.maxsim import MaxSim
from embedtrain.losses.score import Score, VectorScore
from embedtrain.losses.similarity import at_least_float32

DENSE, TOKENS = VectorScore(Similarity.dot), MaxSim(mean=True)


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
        return weighted_sum(self.settings.weights, compare_parts(first, second, owners, counts))


def compare_parts(queries: Parts, documents: Parts, owners: Tensor, counts: NDArray[np.int64]) -> list[Tensor]:
    """The three scores of each document and its query, [M] each; see `Score.compare`."""
    return [
        DENSE.compare(queries.dense, documents.dense, owners, counts),
        compare_lexical(queries.lexical, documents.lexical, owners),
        TOKENS.compare(queries.tokens, documents.tokens, owners, counts),
    ]


def weighted_sum(weights: Sequence[float], scores: Sequence[Tensor]) -> Tensor:
    """Of scores of the same shape."""
    return torch.stack([weight * score for weight, score in zip(weights, scores, strict=True)]).sum(dim=0)
