"""Floating point operations of a step: what a model's arithmetic asks for, and not what a program does besides.

Padding, activations that are computed again and the second forward pass of gradient caching are no work of the model's,
so none of them is counted: a program that avoids them is faster at the same count. The way of counting is that of
Chowdhery et al., "PaLM" (2022), appendix B: 6 for each weight and token, 12 for each pair of tokens that see each other
and each element of their queries.
"""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PretrainedConfig

from embedtrain.models.attention_direction import attends_causally
from embedtrain.models.encoder import Encoder
from embedtrain.models.four_bit import four_bit_layers


def token_flops(multiplied: float, trained: float, attention: float) -> tuple[float, float]:
    """Of a token's forward and backward pass: two a weight, two more for every gradient; attention besides.

    Args:
        multiplied: elements of weights that it is multiplied with.
        trained: of these, those with a gradient of their own.
        attention: of the forward pass, the products of queries, keys and values.
    """
    return 2.0 * multiplied + attention, 2.0 * (multiplied + trained) + 2.0 * attention


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Layers that are alike.

    Attributes:
        layers: how many.
        width: heads x size of a head, of the queries.
        causal: whether a token sees none behind it.
        window: how many tokens it sees on a side at most, itself not counted; None: all.
    """

    layers: int
    width: int
    causal: bool
    window: int | None = None

    def pairs(self, lengths: Tensor) -> Tensor:
        """Pairs of a token and one that it sees, in texts of these lengths; float64, of the same shape."""
        lengths = lengths.double()
        reach = lengths if self.window is None else lengths.clamp(max=self.window + 1)
        # The first tokens see as many before them as there are, the others `reach - 1`.
        before = reach * (reach - 1) / 2 + (lengths - reach) * (reach - 1)
        return lengths + (before if self.causal else 2.0 * before)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What texts ask of a model.

    Attributes:
        multiplied: elements of weights that every token is multiplied with: no embeddings, which are looked up, and no
            biases and norms.
        trained: of these, those with a gradient of their own; others pass their input's on alone.
        attention: its layers.
    """

    multiplied: int
    trained: int
    attention: tuple[AttentionLayers, ...]

    def of(self, lengths: Tensor) -> float:
        """Of the forward and the backward pass of texts of these lengths, int64 [N], in tokens."""
        seen = sum(4.0 * kind.layers * kind.width * float(kind.pairs(lengths).sum()) for kind in self.attention)
        tokens = float(lengths.sum())
        return sum(token_flops(tokens * self.multiplied, tokens * self.trained, seen))


NO_FLOPS = ModelFlops(0, 0, ())  # of a model that is not looked at


def model_flops(encoder: Encoder) -> ModelFlops:
    """Look at an encoder, its `requires_grad` as it will be trained; sharded or not."""
    looked_up = {id(p) for part in encoder.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    weights = [p for p in encoder.parameters() if p.dim() > 1 and id(p) not in looked_up]
    load_in_4bit = sum(layer.in_features * layer.out_features for _, layer in four_bit_layers(encoder))
    return ModelFlops(
        multiplied=sum(weight.numel() for weight in weights) + load_in_4bit,
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        attention=_attention(encoder.backbone.config),
    )


def _attention(config: PretrainedConfig) -> tuple[AttentionLayers, ...]:
    """By the names that transformers' configurations have, or map their own to (read on 5.23)."""
    config = config.get_text_config()
    layers = int(getattr(config, "num_hidden_layers", 0))
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None)
    width = int(heads * size) if heads and size else int(config.hidden_size)
    causal = attends_causally(config)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * layers)
    # Looking back a window counts the token itself, looking both ways it does not.
    reach = None if window is None else int(window) - causal
    counts = Counter(reach if kind == "sliding_attention" else None for kind in kinds)
    return tuple(AttentionLayers(number, width, causal, reach) for reach, number in counts.items())
