"""Settings of models in the manner of BGE-M3: dense, lexical and multi-vector representations of a text."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from embedtrain.config.validation import OptionChecks


class HybridWeights(NamedTuple):
    """The weights of the scores of the three representations in their sum, the score of two texts."""

    dense: float = 1.0
    lexical: float = 0.3
    multi_vector: float = 1.0


def check_hybrid_weights(weights: list[float] | None, check: OptionChecks) -> None:
    """Raise a ConfigError unless they are weights of the three scores."""
    check.require(
        weights is None
        or (
            len(weights) == len(HybridWeights._fields)
            and all(0 <= weight < math.inf for weight in weights)
            and any(weights)
        ),
        "hybrid_weights",
        f"must be the weights of the {', '.join(HybridWeights._fields)} scores, at least 0 and one above 0",
    )


@dataclass(frozen=True, kw_only=True)
class M3Settings:
    """What a model of this kind computes.

    The encoder returns a row per token of a text. The first token's row has the dense vector, that of each other token
    its vector; the last column is the token's lexical weight.
    """

    dimension: int  # of the dense vector
    token_dimension: int  # of a token's vector
    weights: HybridWeights
    is_new: bool = False  # whether the two linear layers are not in the files and start from the seed
