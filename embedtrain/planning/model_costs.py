"""What a model is to a plan: its groups of weights, what is trained of them, and what a token takes.

Read off an encoder on the meta device; no weight is ever there.
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


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that FSDP gathers together.

    Attributes:
        trained: elements with a gradient.
        frozen: elements without.
        frozen_bytes: what these are stored in.
    """

    trained: int = 0
    frozen: int = 0
    frozen_bytes: int = 0

    @property
    def elements(self) -> int:
        """All of them."""
        return self.trained + self.frozen


@dataclass(frozen=True)
class ModelSpec:
    """What is known of a model without its weights.

    Attributes:
        name: the backbone's class.
        blocks: groups of weights of the blocks, in order.
        root: the weights outside of blocks and of `embedding`.
        embedding: the vocabulary's embedding where it is large enough to be a group of its own.
        looked_up: elements that are looked up and not multiplied with: embeddings.
        frozen_by_dtype: bytes of what is not trained, by the type's name.
        buffers: bytes that every rank holds.
        hidden: size of a token's vector.
        dimension: of a text's vector.
        can_recompute: whether blocks' activations can be recomputed.
        precision: what is computed in.
        tokens_per_text: length that activations are those of.
        keeps: Activations with recomputed blocks (True) or without, measured when asked for.
        bound: the same, larger than measured and at once.
    """

    name: str
    blocks: tuple[Group, ...]
    root: Group
    embedding: Group
    looked_up: int
    frozen_by_dtype: dict[str, int]
    buffers: int
    hidden: int
    dimension: int
    can_recompute: bool
    precision: Precision
    tokens_per_text: int
    keeps: Callable[[bool], Activations] = field(repr=False, compare=False)
    bound: Callable[[bool], Activations] = field(repr=False, compare=False)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All of them."""
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
        """What weights without a gradient are stored in."""
        return sum(group.frozen_bytes for group in self.groups)

    @property
    def block(self) -> Group:
        """The largest block."""
        return max(self.blocks, key=lambda group: group.elements, default=Group())

    @property
    def compute_bytes(self) -> int:
        """Of an element that is computed with."""
        return compute_dtype(self.precision).itemsize

    def bounded(self) -> "ModelSpec":
        """The same with activations that are not measured, but larger."""
        return replace(self, keeps=self.bound)


def compute_dtype(precision: Precision) -> torch.dtype:
    """What `parallel.precision` computes in."""
    return torch.bfloat16 if precision is Precision.bf16 else torch.float32


def model_spec(
    encoder: Encoder,
    blocks: list[nn.Module],
    *,
    precision: Precision,
    tokens_per_text: int,
    gpu: bool,
    packed: bool = False,
) -> ModelSpec:
    """Look at an encoder on the meta device, its `requires_grad` and types as it will be trained.

    Args:
        encoder: see there.
        blocks: the modules inside that become groups of their own.
        precision: what will be computed in.
        tokens_per_text: length of its texts.
        gpu: whether it will run on one.
        packed: whether its texts will be packed.
    """
    embedding = large_embedding(encoder)
    inside = {id(p) for block in blocks for p in block.parameters()}
    alone = [] if embedding is None else [p for p in embedding.parameters() if id(p) not in inside]
    inside |= {id(p) for p in alone}
    frozen: Counter[str] = Counter()
    for parameter in encoder.parameters():
        if not parameter.requires_grad:
            frozen[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    hidden, dtype = hidden_size(encoder.backbone.config), compute_dtype(precision)

    @functools.cache
    def keeps(recompute: bool) -> Activations:
        try:
            return activations.measure(
                encoder,
                blocks,
                dtype=dtype,
                tokens_per_text=tokens_per_text,
                recompute=recompute,
                gpu=gpu,
                packed=packed,
            )
        except Exception:  # of a model's own code, which may do anything with a tensor that has no content
            return activations.rule_of_thumb(hidden, dtype, recompute=recompute)

    return ModelSpec(
        name=type(encoder.backbone).__name__.removeprefix("FSDP"),
        blocks=tuple(_group(block.parameters()) for block in blocks),
        root=_group(p for p in encoder.parameters() if id(p) not in inside),
        embedding=_group(alone),
        looked_up=sum(p.numel() for m in encoder.modules() if isinstance(m, nn.Embedding) for p in m.parameters()),
        frozen_by_dtype=dict(frozen),
        buffers=sum(buffer.nbytes for buffer in encoder.buffers())
        + sum(layer.num_bytes for _, layer in four_bit_layers(encoder)),
        hidden=hidden,
        dimension=encoder.dimension,
        can_recompute=bool(blocks),
        precision=precision,
        tokens_per_text=tokens_per_text,
        keeps=keeps,
        bound=functools.partial(_bound, hidden, dtype, tokens_per_text),
    )


def _bound(hidden: int, dtype: torch.dtype, tokens_per_text: int, recompute: bool) -> Activations:
    return activations.upper_bound(hidden, dtype, tokens_per_text=tokens_per_text, recompute=recompute)


def _group(parameters: Iterable[Tensor]) -> Group:
    trained = frozen = size = 0
    for parameter in parameters:
        if parameter.requires_grad:
            trained += parameter.numel()
        else:
            frozen += parameter.numel()
            size += parameter.nbytes
    return Group(trained, frozen, size)
