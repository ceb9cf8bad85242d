"""Costs of a model: FSDP parameter groups, trained weights, and activations per token, of an encoder without memory.

Activations are measured on the meta device with one and with two transformer blocks. The encoder's own code runs on
tensors without memory while live bytes are counted, so nothing depends on the architecture; two blocks minus one is a
block. Attention is counted like a fused kernel: queries, keys, values, output, log-sum-exp and, with padding, the bias
of the mask, but never the attention matrix. Models with an attention implementation of their own are counted as they
compute.
"""

import contextlib
import copy
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private names, checked on torch 2.15
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

from embedtrain.config.recipe import SELECTIVE, Precision, Recipe
from embedtrain.data.types import Chunk, Packing
from embedtrain.distributed.block_compute import changes_kept_results, recompute_activations, use_fp8
from embedtrain.distributed.sharding import large_embedding
from embedtrain.formats.hub import download_configuration
from embedtrain.formats.peft import open_adapter
from embedtrain.formats.source import open_model_source
from embedtrain.models.adapters import add_adapters, four_bit_layers, frozen_dtype
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder
from embedtrain.models.encoder import Encoder, hidden_size
from embedtrain.models.fused_kernels import Kernels, fuse
from embedtrain.models.stored_weights import stored_dtype
from embedtrain.models.types import ModelSource
from embedtrain.planning.flops import lookup_weights, token_flops, vision_flops

# Tokens of the measured pass. They cost nothing on the meta device, and make constant sizes (the gradient of a weight)
# negligible.
_TOKENS = 1 << 17
_MASTER_BYTES = 4  # of an element of a trained weight, which is fp32
_PADDED = "embedtrain_padded_shapes"
_PACKED_ON_GPU, _PACKED_ON_CPU = "embedtrain_packed_shapes_on_gpu", "embedtrain_packed_shapes_on_cpu"
# Of a vision tower with pictures of any number of patches: see `VISION_ATTENTION` in `models/vision_language.py`.
_VISION_ON_GPU, _VISION_ON_CPU = "embedtrain_flash_shapes_on_gpu", "embedtrain_flash_shapes_on_cpu"
# Of the measured pass of a vision tower: patches along each side of a picture, and of all.
_GRID, _PATCHES = 64, 1 << 15
# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022): without attention matrices
# a block saves 34 bytes per token and hidden unit in 16 bits.
_RULE_OF_THUMB = 34 / 2
# Elements per token, block and hidden unit: no known architecture saves more, Gemma 3 saves 35. And an attention that
# computes its matrix saves a few elements per head and token of the text; no head has fewer than 16 units.
_BOUND, _BOUND_OF_HEADS = 80, 4 / 16
# The same of the results of products and attention: what `SELECTIVE` keeps.
_BOUND_OF_PRODUCTS, _PRODUCTS_BY_RULE_OF_THUMB = 40, 11


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes per token."""

    block: float  # that the forward pass of a block saves for its backward pass
    rest: float  # that everything else saves: embeddings, final norm, pooling
    forward: float  # peak of the forward pass above what it saves
    backward: float  # peak of the backward pass above what the forward pass saved
    no_grad: float  # peak of a forward pass without gradients

    def cached(self, blocks: int) -> float:
        """Bytes per token between the forward and the backward pass of a model with this number of blocks."""
        return self.rest + blocks * self.block


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate while it is active, each once, without `existing`.

    As with an allocator, a storage counts until its last tensor is freed. After the forward pass, what is left is what
    autograd saves for the backward pass. Views of the tensors `existing` are not counted either.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self._live: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._existing or key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = weakref.ref(storage, self._on_free(key, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _on_free(self, key: int, size: int) -> Callable[[object], None]:
        def freed(_: object) -> None:
            self._live.pop(key, None)
            self.bytes -= size

        return freed


def measure_activations(
    encoder: Encoder,
    blocks: list[nn.Module],
    *,
    dtype: torch.dtype,
    tokens_per_text: int,
    recompute: bool | str,
    gpu: bool,
    packed: bool = False,
    fused: bool = False,
) -> Activations:
    """Run one and two blocks of the encoder forward and backward on the meta device.

    The encoder is on the meta device, has `requires_grad` as in training, and is not modified. With `gpu` dropout keeps
    one byte per element, as on CUDA, else the compute type; with `fused` blocks compute with fused kernels. Raises what
    the model's own code raises on the meta device.
    """
    passes = []
    attention = (_PACKED_ON_GPU if gpu else _PACKED_ON_CPU) if packed else _PADDED
    for number in range(1, min(2, len(blocks)) + 1):
        with _first_blocks(encoder, blocks, number):
            part = copy.deepcopy(encoder)
            included = {id(block) for block in blocks[:number]}
            copied = [
                copy for block, copy in zip(encoder.modules(), part.modules(), strict=True) if id(block) in included
            ]
        _prepare(part, dtype, attention, gpu=gpu)
        if fused:
            fuse(copied, _KERNEL_SHAPES)
        if recompute:
            recompute_activations(copied, recompute)
        passes.append(_measure_passes(part, tokens_per_text))
    saved, forward, backward, no_grad = passes[-1]
    block = saved - passes[0][0] if len(passes) == 2 else 0.0
    rest = max(0.0, passes[0][0] - block) if blocks else saved
    return Activations(block, rest, forward - saved, backward - saved, no_grad)


def rule_of_thumb(hidden: int, dtype: torch.dtype, *, recompute: bool | str) -> Activations:
    """Activations of a model whose code does not run on the meta device."""
    return _from_elements(hidden * dtype.itemsize, _RULE_OF_THUMB, _PRODUCTS_BY_RULE_OF_THUMB, recompute=recompute)


def upper_bound(hidden: int, dtype: torch.dtype, *, tokens_per_text: int, recompute: bool | str) -> Activations:
    """An upper bound of the activations of any model, without a measurement."""
    block = _BOUND + _BOUND_OF_HEADS * tokens_per_text
    return _from_elements(hidden * dtype.itemsize, block, _BOUND_OF_PRODUCTS, recompute=recompute)


def _from_elements(size: int, block: float, products: float, *, recompute: bool | str) -> Activations:
    kept = {False: block, SELECTIVE: products}.get(recompute, 0.0) + 2.0 * bool(recompute)
    return Activations(
        block=size * kept,  # of a recomputed block its input as well, and a reserve for what a few models also save
        rest=size * 4.0,
        forward=size * block,
        backward=size * block * (2.0 if recompute else 1.0),
        no_grad=size * block,
    )


def _measure_passes(encoder: Encoder, length: int) -> tuple[float, float, float, float]:
    """Bytes per token: saved by the forward pass, peaks of forward pass, backward pass and pass without gradients."""
    texts = max(1, _TOKENS // length)
    ids = torch.empty((texts, length), dtype=torch.int64, device="meta")
    mask = torch.empty_like(ids)
    existing = [ids, mask, *encoder.parameters(), *encoder.buffers()]
    with LiveBytes(existing) as live:
        (vectors,) = encoder(Chunk(ids, mask))
        saved, forward = live.bytes, live.peak
        live.peak = saved
        if vectors.requires_grad:
            vectors.sum().backward()
        backward = live.peak
    del vectors
    with torch.no_grad(), LiveBytes(existing) as live:
        encoder(Chunk(ids, mask))
        no_grad = live.peak
    tokens = texts * length
    return saved / tokens, forward / tokens, backward / tokens, no_grad / tokens


def _prepare(part: Encoder, dtype: torch.dtype, attention: str, *, gpu: bool) -> None:
    part.to("meta").to(dtype)
    for module in part.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = attention
        if gpu and isinstance(module, nn.Dropout) and module.p > 0:
            module.forward = _fused_dropout(module.p)  # type: ignore[method-assign]
    part.train()
    for parameter in part.parameters():
        if parameter.requires_grad:
            # FSDP takes gradients away as soon as a group is complete; they are counted with the groups.
            parameter.register_post_accumulate_grad_hook(_drop_grad)


@contextlib.contextmanager
def _first_blocks(encoder: nn.Module, blocks: list[nn.Module], number: int) -> Iterator[None]:
    """Remove all but the first blocks of the encoder while it is copied."""
    included = {id(block) for block in blocks[:number]}
    excluded = {id(block) for block in blocks[number:]}
    lists = [
        (module, dict(module._modules))
        for module in encoder.modules()
        if isinstance(module, nn.ModuleList) and any(id(child) in included | excluded for child in module)
    ]
    try:
        for module, children in lists:
            first = [child for child in children.values() if id(child) not in excluded]
            module._modules.clear()
            module._modules.update({str(index): child for index, child in enumerate(first)})
        yield
    finally:
        for module, children in lists:
            module._modules.clear()
            module._modules.update(children)


def _drop_grad(parameter: Tensor) -> None:
    parameter.grad = None


def _fused_dropout(p: float) -> Any:
    return lambda hidden: torch.native_dropout(hidden, p, True)[0]


def _attention_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [N, L, heads, size] and log-sum-exp of a fused kernel."""
    texts, heads, length, _ = q.shape
    return q.new_empty(texts, length, heads, v.shape[-1]), q.new_empty(texts, heads, length, dtype=torch.float32)


# An operation, whose results selective recomputation keeps by its name.
_attention_operation = torch.library.custom_op("embedtrain::attention_shapes", _attention_shapes, mutates_args=())
_attention_operation.register_fake(_attention_shapes)


class _Attention(torch.autograd.Function):
    """Allocates and saves what a fused kernel does, with or without a mask. q, k, v: [N, heads, L, size]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> Tensor:
        texts, _, length, _ = q.shape
        out: Tensor
        out, log_sum_exp = _attention_operation(q, k, v)
        bias = q.new_empty(texts, 1, length, k.shape[2] if masked else 0)  # the mask as an additive bias
        ctx.save_for_backward(q, k, v, out, log_sum_exp, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    return _fused(query, key, value, masked=True), None


def _packed_on_gpu(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    return _fused(query, key, value, masked=False), None


def _packed_on_cpu(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """In fp32, and the outputs of the texts are concatenated again."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.float(), repeat_kv(key.float(), groups), repeat_kv(value.float(), groups)
    return torch.cat([_fused(q, k, v, masked=False)]).to(value.dtype), None


def _fused(query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> Tensor:
    """Repeats the keys and values of grouped heads, as transformers does with a mask."""
    groups = query.shape[1] // key.shape[1]
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, repeat_kv(key, groups), repeat_kv(value, groups), masked
    )
    return out


class _Norm(torch.autograd.Function):
    """Allocates and saves what a fused norm does: its input, and a number in fp32 for each of its rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *_: object) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight), None, None, None, None


class _Product(torch.autograd.Function):
    """Saves what a fused SwiGLU does, and has the gradients in the same memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        return gate, up


_KERNEL_SHAPES = Kernels(
    norm=_Norm.apply,
    silu=_Product.apply,
    gelu=_Product.apply,
    rotate=lambda q, k, cos, sin: (q, k),
)


# transformers has no mask function for these names, so it creates no mask.
AttentionInterface.register(_PADDED, _padded)
AttentionInterface.register(_PACKED_ON_GPU, _packed_on_gpu)
AttentionInterface.register(_PACKED_ON_CPU, _packed_on_cpu)
AttentionInterface.register(_VISION_ON_GPU, _packed_on_gpu)
AttentionInterface.register(_VISION_ON_CPU, _packed_on_cpu)


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
class ParameterShape:
    """The shape of a parameter, as sharding divides it."""

    shape: tuple[int, ...]
    row_bytes: int  # of storage
    trained: bool
    in_block: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def shard_bytes(self, shards: int) -> int:
        """Bytes of the largest of so many shards."""
        return -(-self.shape[0] // shards) * self.row_bytes


@dataclass(frozen=True, slots=True)
class ItemFlops:
    """FLOPs of a token of an item of L tokens, with padding and attention to all tokens: `x[0] + x[1] * L`."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    max_tokens: int | None = None  # of an item; None: any number

    def of(self, tokens: int) -> tuple[float, float]:
        """FLOPs of the forward and of the backward pass of an item of so many tokens."""
        length = min(tokens, self.max_tokens or tokens)
        forward, backward = (length * (of[0] + of[1] * length) for of in (self.forward, self.backward))
        return forward, backward


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """The weights of a model."""

    blocks: tuple[ParameterGroup, ...]
    root: ParameterGroup  # weights outside the blocks and `embedding`
    embedding: ParameterGroup  # the vocabulary's, if it is large enough to be a separate group
    query: ItemFlops  # of the tower that encodes queries, which are texts
    document: ItemFlops  # of the tower that encodes documents, which are pictures if the model reads them
    frozen_by_dtype: dict[str, int]  # bytes, by name of the type
    buffers: int  # bytes, which every rank holds
    # What a token of a picture counts in `train.chunk_tokens`, at least.
    picture_cost: float
    shapes: Mapping["ParameterShape", int]  # number of parameters of each shape

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
    decoded_bytes: float  # of a token: pixels
    # With activation checkpointing as of ParallelLayout, measured on the first call.
    activations: Callable[[bool | str], Activations] = field(repr=False, compare=False)
    # An upper bound of `activations` that needs no measurement.
    activation_bound: Callable[[bool | str], Activations] = field(repr=False, compare=False)
    # Whether blocks can be recomputed between products: not if they change results in place; None if the model's code
    # does not run without weights. Measured as well.
    allows_selective: Callable[[], bool | None] = field(repr=False, compare=False)

    def num_vectors(self, texts: float, texts_per_row: int) -> float:
        """Vectors of so many texts of rows with one query each."""
        queries, documents = self.vectors
        return texts / texts_per_row * (queries + (texts_per_row - 1) * documents)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute type."""
        return compute_dtype(self.precision).itemsize

    def bounded(self) -> "ModelSpec":
        """The same model with the upper bound of its activations, and without a measurement."""
        return replace(self, activations=self.activation_bound, allows_selective=lambda: True)


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
    fused: bool = False,
    vectors: tuple[int, int] = (1, 1),
) -> ModelSpec:
    """The costs of an encoder on the meta device, with `requires_grad` and types as in training.

    `blocks` are the modules that become separate FSDP groups, `fused` says whether they compute with fused kernels, and
    `vectors` are the vectors of a query and of a document.
    """
    embeddings = [part for tower in encoder.towers.values() if (part := large_embedding(tower)) is not None]
    grouped = {id(p) for block in blocks for p in block.parameters()}
    separate = [p for embedding in embeddings for p in embedding.parameters() if id(p) not in grouped]
    grouped |= {id(p) for p in separate}
    of_blocks = {id(p) for block in blocks for p in block.parameters()}
    frozen: Counter[str] = Counter()
    for parameter in encoder.parameters():
        if not parameter.requires_grad:
            frozen[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    towers: dict[Encoder, list[nn.Module]] = {}
    for tower in encoder.towers.values():
        own = {id(part) for part in tower.modules()}
        towers[tower] = [block for block in blocks if id(block) in own]
    hidden, dtype = max(hidden_size(tower.backbone.config) for tower in towers), compute_dtype(precision)
    in_vision = {id(part) for tower in towers for module in tower.vision_modules for part in module.modules()}
    flops = [
        item_flops(tower, sum(id(block) not in in_vision for block in of_tower)) for tower, of_tower in towers.items()
    ]
    buffers = sum(buffer.nbytes for buffer in encoder.buffers())
    weights = WeightSpec(
        blocks=tuple(_group(block.parameters()) for block in blocks),
        root=_group(p for p in encoder.parameters() if id(p) not in grouped),
        embedding=_group(separate),
        query=flops[0],
        document=flops[-1] if len(towers) > 1 or encoder.vision is None else with_vision(flops[0], encoder),
        frozen_by_dtype=dict(frozen),
        buffers=buffers + sum(layer.num_bytes for _, layer in four_bit_layers(encoder)),
        picture_cost=1.0 if encoder.vision is None else 1.0 + encoder.vision.cost_per_token,
        shapes=Counter(_shape(p, in_block=id(p) in of_blocks) for p in encoder.parameters()),
    )

    @functools.cache
    def try_measuring(recompute: bool | str) -> Activations | Exception:
        try:
            measured = []
            for tower, blocks_of_tower in towers.items():
                of_blocks = functools.partial(
                    measure_activations,
                    tower,
                    dtype=dtype,
                    tokens_per_text=min(tokens_per_text, tower.max_tokens or tokens_per_text),
                    recompute=recompute,
                    gpu=gpu,
                    packed=packed,
                    fused=fused,
                )
                measured.append(_with_pictures(tower, blocks_of_tower, of_blocks, dtype, recompute=recompute, gpu=gpu))
            return measured[0] if len(measured) == 1 else _largest(measured, list(map(len, towers.values())))
        except Exception as error:  # a model's own code may do anything with tensors that have no content
            return error

    def measure(recompute: bool | str) -> Activations:
        measured = try_measuring(recompute)
        return measured if isinstance(measured, Activations) else rule_of_thumb(hidden, dtype, recompute=recompute)

    def allows_selective() -> bool | None:
        measured = try_measuring(SELECTIVE)
        return True if isinstance(measured, Activations) else False if changes_kept_results(measured) else None

    def bound(recompute: bool | str) -> Activations:
        return upper_bound(hidden, dtype, tokens_per_text=tokens_per_text, recompute=recompute)

    name = " and ".join(type(tower.backbone).__name__.removeprefix("FSDP") for tower in towers)
    decoded = max(tower.decoded_bytes for tower in towers)
    return ModelSpec(
        name, weights, hidden, encoder.dimension, precision, vectors, decoded, measure, bound, allows_selective
    )


def item_flops(tower: Encoder, num_blocks: int) -> ItemFlops:
    """FLOPs of the tokens of a tower with so many blocks, without those of a vision tower."""
    apart = {id(weight) for module in tower.vision_modules for weight in module.parameters()}
    apart |= {id(weight) for weight in lookup_weights(tower)}
    weights = [weight for weight in tower.parameters() if id(weight) not in apart]
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    forward, backward = token_flops(sum(weight.numel() for weight in weights), trained, 0.0)
    attention = 4.0 * num_blocks * hidden_size(tower.backbone.config)
    # A frozen tower of two has no backward pass. A frozen language model has one, of what its vision tower computes.
    runs_backward = trained > 0 or tower.vision is not None
    return ItemFlops(
        (forward, attention), (backward * runs_backward, 2.0 * attention * runs_backward), tower.max_tokens
    )


def with_vision(tokens: ItemFlops, encoder: Encoder) -> ItemFlops:
    """FLOPs of an item that is one picture: those of its `tokens`, and of the patches that each of them stands for."""
    family = encoder.vision
    assert family is not None
    patches, weights = family.merge**2, vision_flops(encoder)
    forward, backward = token_flops(patches * weights.matmul_elements, patches * weights.trained, 0.0)
    constant = slope = 0.0
    for layers, reach in family.attention_layers:
        seen = family.grid_patches if reach is None else reach
        if seen is None:
            slope += 4.0 * layers * family.width * patches**2
        else:
            constant += 4.0 * layers * family.width * patches * seen
    is_trained = weights.trained > 0
    return replace(
        tokens,
        forward=(tokens.forward[0] + forward + constant, tokens.forward[1] + slope),
        backward=(
            tokens.backward[0] + (backward + 2.0 * constant) * is_trained,
            tokens.backward[1] + 2.0 * slope * is_trained,
        ),
    )


def _with_pictures(
    encoder: Encoder,
    blocks: list[nn.Module],
    measure: Callable[[list[nn.Module]], Activations],
    dtype: torch.dtype,
    *,
    recompute: bool | str,
    gpu: bool,
) -> Activations:
    """What `measure` returns of the blocks that compute tokens, with a vision tower that computes their rows.

    Per token of the chunk that needs the most: one of pictures alone, or one of texts alone.
    """
    family = encoder.vision
    if family is None:
        return measure(blocks)
    in_vision = {id(part) for module in encoder.vision_modules for part in module.modules()}
    of_language = [block for block in blocks if id(block) not in in_vision]
    of_vision = [block for block in blocks if id(block) in in_vision]
    # Other blocks of the tower, such as those that merge rows of inner layers, are few.
    kind = Counter(map(type, of_vision)).most_common(1)[0][0]
    layers, others = ([block for block in of_vision if (type(block) is kind) is is_layer] for is_layer in (True, False))
    tokens, patches, cost = measure(of_language), family.merge**2, 1.0 + family.cost_per_token
    of_tokens = tokens.cached(len(of_language))
    try:
        patch = _measure_vision(encoder, layers, others, dtype=dtype, recompute=recompute, gpu=gpu)
    except Exception:  # a model's own code may do anything with tensors that have no content
        patch = rule_of_thumb(family.width, dtype, recompute=recompute)
    is_trained = any(weight.requires_grad for module in encoder.vision_modules for weight in module.parameters())
    total = of_tokens + patches * patch.cached(len(layers)) * is_trained
    # A chunk of texts alone has `cost` times as many tokens as one of pictures alone.
    texts = cost if cost * of_tokens > total else 1.0
    in_pass = patch.forward if is_trained else patch.no_grad
    return Activations(
        block=(max(total, texts * of_tokens) - tokens.rest) / max(1, len(blocks)),
        rest=tokens.rest,
        # A pass computes pictures before tokens, and their gradients after those of tokens.
        forward=max(texts * tokens.forward, patches * in_pass - of_tokens),
        backward=max(texts * tokens.backward, patches * patch.backward * is_trained - of_tokens),
        no_grad=max(cost * tokens.no_grad, patches * patch.no_grad),
    )


def _measure_vision(
    encoder: Encoder,
    layers: list[nn.Module],
    others: list[nn.Module],
    *,
    dtype: torch.dtype,
    recompute: bool | str,
    gpu: bool,
) -> Activations:
    """`measure_activations` of a vision tower, per patch; `others` are blocks that are no layers."""
    family = encoder.vision
    assert family is not None
    side = _GRID - _GRID % family.merge
    grid = family.dummy_grid if family.grid_patches is not None else (side, side)
    grids = np.array([grid] * max(1, _PATCHES // (grid[0] * grid[1])))
    count, passes = int(grids.prod(axis=1).sum()), []
    attention = _PACKED_ON_GPU if family.grid_patches is not None else _VISION_ON_GPU if gpu else _VISION_ON_CPU
    for number in (1, 2):
        with _first_blocks(encoder, layers, number):
            part = copy.deepcopy(encoder)
            included = {id(block) for block in (*layers[:number], *others)}
            copied = [
                copy for block, copy in zip(encoder.modules(), part.modules(), strict=True) if id(block) in included
            ]
        _prepare(part, dtype, attention, gpu=gpu)
        if recompute:
            recompute_activations(copied, recompute)
        inputs = {name: _on_meta(value) for name, value in family.inputs(grids).items()}
        existing = [value for value in inputs.values() if isinstance(value, Tensor)]
        existing += [*part.parameters(), *part.buffers()]
        with LiveBytes(existing) as live:
            pixels = torch.empty(family.pixel_shape(grids), dtype=dtype, device="meta")
            rows, deeper = family.features(part.backbone, pixels, inputs)
            saved, forward = live.bytes, live.peak
            live.peak = saved
            if rows.requires_grad:
                sum((of_layer.sum() for of_layer in deeper), rows.sum()).backward()
            backward = live.peak
        del rows, deeper, pixels
        with torch.no_grad(), LiveBytes(existing) as live:
            pixels = torch.empty(family.pixel_shape(grids), dtype=dtype, device="meta")
            family.features(part.backbone, pixels, inputs)
            no_grad = live.peak
        del pixels
        passes.append((saved, forward, backward, no_grad))
    saved, forward, backward, no_grad = passes[-1]
    block = saved - passes[0][0]
    rest = max(0.0, passes[0][0] - block)
    numbers = (block, rest, forward - saved, backward - saved, no_grad)
    return Activations(*(number / count for number in numbers))


def _on_meta(value: Tensor | Packing) -> Tensor | Packing:
    return value.to("meta") if isinstance(value, Tensor) else value.map_tensors(lambda tensor: tensor.to("meta"))


def _largest(activations: Sequence[Activations], num_blocks: Sequence[int]) -> Activations:
    """The most of several towers with these numbers of blocks, of which a pass computes one."""
    blocks = max(of.block * number for of, number in zip(activations, num_blocks, strict=True))
    return Activations(
        block=blocks / max(1, sum(num_blocks)),
        rest=max(of.rest for of in activations),
        forward=max(of.forward for of in activations),
        backward=max(of.backward for of in activations),
        no_grad=max(of.no_grad for of in activations),
    )


def _group(parameters: Iterable[Tensor]) -> ParameterGroup:
    trained = frozen = size = 0
    for parameter in parameters:
        if parameter.requires_grad:
            trained += parameter.numel()
        else:
            frozen += parameter.numel()
            size += parameter.nbytes
    return ParameterGroup(trained, frozen, size)


def _shape(parameter: Tensor, *, in_block: bool) -> ParameterShape:
    size = _MASTER_BYTES if parameter.requires_grad else parameter.dtype.itemsize
    row_bytes = size * (parameter.numel() // max(1, len(parameter)))
    return ParameterShape(tuple(parameter.shape), row_bytes, parameter.requires_grad, in_block)


# Length of texts if neither the recipe nor the model directory sets one.
_DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class MetaEncoder:
    """An encoder on the meta device, with adapters and `requires_grad` as in training."""

    encoder: Encoder
    source: ModelSource
    blocks: list[nn.Module]
    max_length: int  # of texts, in tokens

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the stored weights; without weights, the type in the configuration."""
        return _stored_dtype(self.source)


def build_meta_encoder(recipe: Recipe) -> MetaEncoder:
    """The encoder that a recipe trains, without its weights; raises ConfigError and ModelError as training does."""
    model = recipe.model
    source = open_model_source(download_configuration(model))
    settings = model.config if isinstance(model.config, dict) else {}
    if model.config is not None and model.tokenizer is None and "vocab_size" not in settings:
        source.config.get_text_config().vocab_size = model.vocab_size  # of the tokenizer that is trained on the data
    adapters = model.adapters
    files = open_adapter(adapters)
    encoder = build_encoder(source, model.dropout)
    if adapters.on:
        frozen = frozen_dtype(adapters.base_dtype, recipe.parallel.precision, _stored_dtype(source))
        add_adapters(encoder, adapters, files, frozen)
    positions = getattr(source.config.get_text_config(), "max_position_embeddings", None) or _DEFAULT_LENGTH
    length = source.tokenization.max_length or min(_DEFAULT_LENGTH, positions)
    length = source.kind.longest_item(source, min(length, source.kind.max_document_length(source) or length))
    blocks = find_blocks(encoder, recipe.parallel.block_class, required=False)
    if recipe.parallel.fp8:
        use_fp8(encoder, blocks)
    return MetaEncoder(encoder, source, blocks, length)


def _stored_dtype(source: ModelSource) -> torch.dtype:
    if source.directory is None or any(source.directory.glob("*.safetensors")):
        return stored_dtype(source)
    return source.config.dtype if isinstance(source.config.dtype, torch.dtype) else torch.float32
