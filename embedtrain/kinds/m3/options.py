"""Options of model.kind=m3."""

from dataclasses import dataclass

from embedtrain.config.kind_settings import check_hybrid_weights
from embedtrain.config.options import option
from embedtrain.config.recipe import ModelConfig
from embedtrain.config.validation import OptionChecks


@dataclass(kw_only=True)
class M3Options(ModelConfig):
    """Three representations of a text, and how their scores are added (Chen et al., 2024, "BGE M3-Embedding")."""

    kind: str = "m3"
    # dimensions of a token's vector; default: that of the directory, else the hidden size
    dimension: int | None = option(None, at_least=1)
    # Weights of the dense, lexical and multi-vector scores in the score of two texts, when training and searching;
    # default: those of the directory, else [1, 0.3, 1].
    hybrid_weights: list[float] | None = None


def check_m3(options: M3Options) -> None:
    """Raise a ConfigError for values that cannot be."""
    check = OptionChecks(options, "model.")
    check_hybrid_weights(options.hybrid_weights, check)
