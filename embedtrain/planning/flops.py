"""FLOPs of a training step: the arithmetic that the model requires, independent of the implementation.

Padding, activation checkpointing and the second forward pass of gradient caching are not counted, so that a program
that avoids them reaches a higher rate. The count follows Chowdhery et al., "PaLM" (2022), appendix B: 6 FLOPs per
weight and token, and 12 per pair of tokens that attend to each other and element of their queries.
"""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PretrainedConfig

from embedtrain.models.attention_direction import attends_causally
from embedtrain.models.encoder import Encoder
from embedtrain.models.four_bit import four_bit_layers
from embedtrain.models.own_class import HEAD


def token_flops(matmul_elements: float, trained: float, attention: float) -> tuple[float, float]:
    """FLOPs of the forward and of the backward pass of a token: 2 per weight, and 2 more per gradient of a weight.

    `matmul_elements` are those of weights that the token is multiplied with, `trained` those with a gradient;
    `attention` is FLOPs of the products of queries, keys and values in the forward pass.
    """
    return 2.0 * matmul_elements + attention, 2.0 * (matmul_elements + trained) + 2.0 * attention


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Attention layers of the same kind."""

    layers: int
    width: int  # number of heads x head size, of the queries
    causal: bool  # whether a token attends only to itself and earlier tokens
    window: int | None = None  # tokens that a token attends to in each direction, without itself; None: all

    def pairs(self, lengths: Tensor) -> Tensor:
        """Pairs of tokens that attend to each other in texts of these lengths; float64, of the same shape."""
        lengths = lengths.double()
        reach = lengths if self.window is None else lengths.clamp(max=self.window + 1)
        # The first tokens attend to all earlier ones, later tokens to `reach - 1`.
        before = reach * (reach - 1) / 2 + (lengths - reach) * (reach - 1)
        return lengths + (before if self.causal else 2.0 * before)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of a model as a function of text lengths."""

    matmul_elements: int  # of weights that every token is multiplied with: no embeddings, biases and norms
    trained: int  # those of them that have a gradient
    attention: tuple[AttentionLayers, ...]

    def of(self, lengths: Tensor) -> float:
        """FLOPs of the forward and backward pass of texts of these lengths, int64 [N], in tokens."""
        attention = sum(4.0 * kind.layers * kind.width * float(kind.pairs(lengths).sum()) for kind in self.attention)
        tokens = float(lengths.sum())
        return sum(token_flops(tokens * self.matmul_elements, tokens * self.trained, attention))


NO_FLOPS = ModelFlops(0, 0, ())  # default if the rate is not of interest


def model_flops(encoder: Encoder) -> ModelFlops:
    """FLOPs of an encoder with `requires_grad` as in training; sharded or not."""
    embeddings, has_vocabulary = {id(p) for p in lookup_weights(encoder)}, encoder.output.has_vocabulary
    weights = [
        p
        for name, p in encoder.named_parameters()
        # The head of a cross-encoder computes one vector of a pair, that of a sparse model one of each token.
        if p.dim() > 1 and id(p) not in embeddings and (has_vocabulary or not name.startswith(HEAD))
    ]
    quantized = sum(layer.in_features * layer.out_features for _, layer in four_bit_layers(encoder))
    return ModelFlops(
        matmul_elements=sum(weight.numel() for weight in weights) + quantized,
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        attention=_attention(encoder.backbone.config),
    )


def lookup_weights(encoder: Encoder) -> list[Tensor]:
    """Weights of embeddings that tokens look up, and are not multiplied with, as with a tied vocabulary head."""
    tied = encoder.backbone.get_input_embeddings() if encoder.tied else None
    return [
        weight
        for part in encoder.modules()
        if isinstance(part, nn.Embedding) and part is not tied
        for weight in part.parameters()
    ]


def _attention(config: PretrainedConfig) -> tuple[AttentionLayers, ...]:
    """From the standard attribute names of transformers' configurations (5.23)."""
    config = config.get_text_config()
    layers = int(getattr(config, "num_hidden_layers", 0))
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None)
    width = int(heads * size) if heads and size else int(config.hidden_size)
    causal = attends_causally(config)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * layers)
    # The window of causal attention includes the token itself, that of bidirectional attention does not.
    reach = None if window is None else int(window) - causal
    counts = Counter(reach if kind == "sliding_attention" else None for kind in kinds)
    return tuple(AttentionLayers(number, width, causal, reach) for reach, number in counts.items())
