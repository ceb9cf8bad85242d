"""Costs of a model: its FSDP parameter groups, trained weights, and activations per token.

Derived from an encoder on the meta device; no weights are loaded.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from embedtrain.config.recipe import Precision
from embedtrain.distributed.sharding import large_embedding
from embedtrain.models.encoder import Encoder, hidden_size
from embedtrain.models.four_bit import four_bit_layers
from embedtrain.planning import activations
from embedtrain.planning.activations import Activations
from embedtrain.planning.flops import lookup_weights


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Weights that FSDP gathers together."""

    trained: int = 0  # elements with a gradient
    frozen: int = 0  # elements without
    frozen_bytes: int = 0  # storage of the frozen elements

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.trained + self.frozen


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """The weights of a model."""

    blocks: tuple[ParameterGroup, ...]
    root: ParameterGroup  # weights outside the blocks and `embedding`
    embedding: ParameterGroup  # the vocabulary's, if it is large enough to be a separate group
    lookup_elements: int  # of embeddings, which are looked up instead of multiplied
    frozen_by_dtype: dict[str, int]  # bytes, by name of the type
    buffers: int  # bytes, which every rank holds

    @property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """All groups."""
        return (self.root, self.embedding, *self.blocks)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(group.elements for group in self.groups)

    @property
    def trained(self) -> int:
        """Elements of weights with a gradient."""
        return sum(group.trained for group in self.groups)

    @property
    def frozen_bytes(self) -> int:
        """Storage of the weights without a gradient."""
        return sum(group.frozen_bytes for group in self.groups)

    @property
    def largest_block(self) -> ParameterGroup:
        """The block with the most elements."""
        return max(self.blocks, key=lambda group: group.elements, default=ParameterGroup())


@dataclass(frozen=True)
class ModelSpec:
    """What a plan needs of a model."""

    name: str  # class of the backbone
    weights: WeightSpec
    hidden: int
    dimension: int  # of an embedding
    precision: Precision
    vectors: tuple[int, int]  # of a query and of a document: 1, or those of tokens
    # With activation checkpointing (True) or without, measured on the first call.
    activations: Callable[[bool], Activations] = field(repr=False, compare=False)
    # An upper bound of `activations` that needs no measurement.
    activation_bound: Callable[[bool], Activations] = field(repr=False, compare=False)

    def num_vectors(self, texts: float, texts_per_row: int) -> float:
        """Vectors of so many texts of rows with one query each."""
        queries, documents = self.vectors
        return texts / texts_per_row * (queries + (texts_per_row - 1) * documents)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute type."""
        return compute_dtype(self.precision).itemsize

    def bounded(self) -> "ModelSpec":
        """The same model with the upper bound of its activations instead of the measured ones."""
        return replace(self, activations=self.activation_bound)


def compute_dtype(precision: Precision) -> torch.dtype:
    """The torch type of `parallel.precision`."""
    return torch.bfloat16 if precision is Precision.bf16 else torch.float32


def model_spec(
    encoder: Encoder,
    blocks: list[nn.Module],
    *,
    precision: Precision,
    tokens_per_text: int,
    gpu: bool,
    packed: bool = False,
    vectors: tuple[int, int] = (1, 1),
) -> ModelSpec:
    """The costs of an encoder on the meta device, with `requires_grad` and types as in training.

    `blocks` are the modules that become separate FSDP groups, `vectors` the vectors of a query and of a document.
    """
    embedding = large_embedding(encoder)
    grouped = {id(p) for block in blocks for p in block.parameters()}
    separate = [] if embedding is None else [p for p in embedding.parameters() if id(p) not in grouped]
    grouped |= {id(p) for p in separate}
    frozen: Counter[str] = Counter()
    for parameter in encoder.parameters():
        if not parameter.requires_grad:
            frozen[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    hidden, dtype = hidden_size(encoder.backbone.config), compute_dtype(precision)
    lookups = (weight.numel() for weight in lookup_weights(encoder))
    buffers = sum(buffer.nbytes for buffer in encoder.buffers())
    weights = WeightSpec(
        blocks=tuple(_group(block.parameters()) for block in blocks),
        root=_group(p for p in encoder.parameters() if id(p) not in grouped),
        embedding=_group(separate),
        lookup_elements=sum(lookups),
        frozen_by_dtype=dict(frozen),
        buffers=buffers + sum(layer.num_bytes for _, layer in four_bit_layers(encoder)),
    )

    @functools.cache
    def measure(recompute: bool) -> Activations:
        try:
            return activations.measure_activations(
                encoder,
                blocks,
                dtype=dtype,
                tokens_per_text=tokens_per_text,
                recompute=recompute,
                gpu=gpu,
                packed=packed,
            )
        except Exception:  # a model's own code may do anything with tensors that have no content
            return activations.rule_of_thumb(hidden, dtype, recompute=recompute)

    def bound(recompute: bool) -> Activations:
        return activations.upper_bound(hidden, dtype, tokens_per_text=tokens_per_text, recompute=recompute)

    name = type(encoder.backbone).__name__.removeprefix("FSDP")
    return ModelSpec(name, weights, hidden, encoder.dimension, precision, vectors, measure, bound)


def _group(parameters: Iterable[Tensor]) -> ParameterGroup:
    trained = frozen = size = 0
    for parameter in parameters:
        if parameter.requires_grad:
            trained += parameter.numel()
        else:
            frozen += parameter.numel()
            size += parameter.nbytes
    return ParameterGroup(trained, frozen, size)
