"""What a forward and a backward pass hold per token: measured on the meta device, with one and with two blocks.

Nothing is guessed by architecture. The encoder's own code runs, on tensors without memory, and the bytes that are
alive are counted; two blocks less one are a block's. Attention counts as a fused kernel does it: queries, keys,
values, output, log-sum-exp and, where texts are padded, the mask's bias, never the matrix of weights. A model that
computes attention by itself is counted as it computes.
"""

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private names, checked on torch 2.13
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

from embedtrain.models.encoder import Encoder


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts the storages that operations make, forward and backward, each once.

    A storage is counted until its last tensor is gone, as an allocator would: what autograd keeps for the backward
    pass is what is left after the forward pass.

    Args:
        known: tensors that were there before; their views make nothing new.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.ref(storage, self._gone(key, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int) -> Callable[[object], None]:
        def gone(_: object) -> None:
            self._seen.pop(key, None)
            self.bytes -= size

        return gone


# Tokens of the measured pass. On the meta device they cost nothing, and what does not grow with them (the gradient of
# one weight) becomes too little to matter.
_TOKENS = 1 << 17
_SHAPES_ONLY = "embedtrain_shapes_only"
_PACKED_ON_GPU, _PACKED_ON_CPU = "embedtrain_packed_shapes_on_gpu", "embedtrain_packed_shapes_on_cpu"
# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022): a block keeps 34 bytes a
# token and hidden unit in 16 bits, without the matrices of attention.
_RULE_OF_THUMB = 34 / 2
# No known architecture keeps more elements a token, a block and a hidden unit: Gemma 3 comes to 35. A head that
# computes its weights one by one keeps a few for every token of the text; none has fewer than 16 units.
_BOUND, _BOUND_OF_HEADS = 80, 4 / 16


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes a token.

    Attributes:
        block: what a block's forward pass leaves for its backward pass.
        rest: what everything else leaves: embeddings, final norm, pooling.
        forward: what the forward pass takes at most above what it leaves.
        backward: what the backward pass takes at most above what the forward pass left.
        alone: what a forward pass without gradient takes at most.
    """

    block: float
    rest: float
    forward: float
    backward: float
    alone: float

    def kept(self, blocks: int) -> float:
        """Bytes a token between the forward and the backward pass of a model of so many blocks."""
        return self.rest + blocks * self.block


def measure(
    encoder: Encoder,
    blocks: list[nn.Module],
    *,
    dtype: torch.dtype,
    tokens_per_text: int,
    recompute: bool,
    gpu: bool,
    packed: bool = False,
) -> Activations:
    """Run one and two blocks of the encoder forward and backward without memory.

    Args:
        encoder: parameters on the meta device, `requires_grad` as it is trained; left as it is.
        blocks: its blocks.
        dtype: what is computed in.
        tokens_per_text: length of the texts.
        recompute: whether blocks' activations are recomputed.
        gpu: whether dropout keeps a byte an element, as CUDA's does, or the type that is computed in.
        packed: whether texts are packed.

    Raises:
        Exception: whatever a model's own code raises on the meta device.
    """
    found = []
    attention = (_PACKED_ON_GPU if gpu else _PACKED_ON_CPU) if packed else _SHAPES_ONLY
    for number in range(1, min(2, len(blocks)) + 1):
        with _first_blocks(encoder, blocks, number):
            part = copy.deepcopy(encoder)
        found.append(_passes(_prepared(part, dtype, attention, recompute=recompute, gpu=gpu), tokens_per_text))
    last = found[-1]
    block = last[0] - found[0][0] if len(found) == 2 else 0.0
    rest = max(0.0, found[0][0] - block) if blocks else last[0]
    return Activations(block, rest, last[1] - last[0], last[2] - last[0], last[3])


def rule_of_thumb(hidden: int, dtype: torch.dtype, *, recompute: bool) -> Activations:
    """What a model keeps whose code does not run on the meta device, by the rule of thumb."""
    return _of_elements(hidden * dtype.itemsize, _RULE_OF_THUMB, recompute=recompute)


def upper_bound(hidden: int, dtype: torch.dtype, *, tokens_per_text: int, recompute: bool) -> Activations:
    """More than a model keeps, without a look at it."""
    return _of_elements(hidden * dtype.itemsize, _BOUND + _BOUND_OF_HEADS * tokens_per_text, recompute=recompute)


def _of_elements(each: int, block: float, *, recompute: bool) -> Activations:
    return Activations(
        block=each * (2.0 if recompute else block),  # its input, and room for what a few models keep besides
        rest=each * 4.0,
        forward=each * block,
        backward=each * block * (2.0 if recompute else 1.0),
        alone=each * block,
    )


def _passes(encoder: Encoder, length: int) -> tuple[float, float, float, float]:
    """Bytes a token: left by the forward pass, most of it, most of the backward pass, most without gradient."""
    texts = max(1, _TOKENS // length)
    ids = torch.empty((texts, length), dtype=torch.int64, device="meta")
    mask = torch.empty_like(ids)
    known = [ids, mask, *encoder.parameters(), *encoder.buffers()]
    with LiveBytes(known) as alive:
        vectors = encoder(ids, mask)
        left, forward = alive.bytes, alive.peak
        alive.peak = left
        if vectors.requires_grad:
            vectors.sum().backward()
        backward = alive.peak
    del vectors
    with torch.no_grad(), LiveBytes(known) as alive:
        encoder(ids, mask)
        alone = alive.peak
    tokens = texts * length
    return left / tokens, forward / tokens, backward / tokens, alone / tokens


def _prepared(part: Encoder, dtype: torch.dtype, attention: str, *, recompute: bool, gpu: bool) -> Encoder:
    part.to("meta").to(dtype)
    for module in part.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = attention
        if gpu and isinstance(module, nn.Dropout) and module.p > 0:
            module.forward = _fused_dropout(module.p)  # type: ignore[method-assign]
    part.train()
    if recompute:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 has a new name for it, 5.17 has not
            part.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in part.parameters():
        if parameter.requires_grad:
            # FSDP takes a gradient away as soon as its group has all of them; counted with the groups.
            parameter.register_post_accumulate_grad_hook(_forget)
    return part


@contextlib.contextmanager
def _first_blocks(encoder: nn.Module, blocks: list[nn.Module], number: int) -> Iterator[None]:
    """The encoder with its first blocks alone, while it is copied."""
    wanted = {id(block) for block in blocks[:number]}
    others = {id(block) for block in blocks[number:]}
    held = [
        (part, dict(part._modules))
        for part in encoder.modules()
        if isinstance(part, nn.ModuleList) and any(id(child) in wanted | others for child in part)
    ]
    try:
        for part, children in held:
            kept = [child for child in children.values() if id(child) not in others]
            part._modules.clear()
            part._modules.update({str(place): child for place, child in enumerate(kept)})
        yield
    finally:
        for part, children in held:
            part._modules.clear()
            part._modules.update(children)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _fused_dropout(p: float) -> Any:
    return lambda hidden: torch.native_dropout(hidden, p, True)[0]


class _Attention(torch.autograd.Function):
    """What a fused kernel makes and keeps, with a mask or without. q, k, v: [N, heads, L, size]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> Tensor:
        texts, heads, length, _ = q.shape
        out = q.new_empty(texts, length, heads, v.shape[-1])
        sums = q.new_empty(texts, heads, length, dtype=torch.float32)
        bias = q.new_empty(texts, 1, length, k.shape[2] if masked else 0)  # the mask as numbers that are added
        ctx.save_for_backward(q, k, v, out, sums, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _shapes_only(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    # With a mask transformers repeats keys and values of grouped heads.
    groups = query.shape[1] // key.shape[1]
    return _fused(query, repeat_kv(key, groups), repeat_kv(value, groups), masked=True), None


def _packed_on_gpu(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    return _fused(query, repeat_kv(key, groups), repeat_kv(value, groups), masked=False), None


def _packed_on_cpu(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """In fp32, and what comes of the runs is put together once more."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.float(), repeat_kv(key.float(), groups), repeat_kv(value.float(), groups)
    return torch.cat([_fused(q, k, v, masked=False)]).to(value.dtype), None


def _fused(query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> Tensor:
    made: Tensor = _Attention.apply(query, key, value, masked)  # type: ignore[no-untyped-call]
    return made


# Names without a mask function of their own: no mask is made.
AttentionInterface.register(_SHAPES_ONLY, _shapes_only)
AttentionInterface.register(_PACKED_ON_GPU, _packed_on_gpu)
AttentionInterface.register(_PACKED_ON_CPU, _packed_on_cpu)
