"""Packed texts: attention over concatenated texts without padding, and checks whether a model supports it.

Each token attends to the tokens of its own text, or to those at its beginning (`Packing.keys`). A model's code calls
`packed_attention` through transformers' AttentionInterface, by a name in its configuration. On a GPU torch's kernel for
variable lengths computes it. Elsewhere adjacent texts of equal length (chunks are sorted by length) form a batch
without a copy, for torch's plain attention, without a mask if all tokens are attended to. Without a `packing`, the same
name is transformers' SDPA attention, bit for bit.

A model that lets a text attend to its neighbours, or counts positions differently, would be silently wrong. So no list
of architectures is trusted: `check_packing` runs its code on the meta device, `packing_mismatch` compares vectors, and
`window_mismatch` those of texts that are longer than the windows of attention.

H: heads; T: tokens; S: size of a head.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from embedtrain.config.recipe import Pooling, Precision
from embedtrain.data.types import Chunk, PackedKeys, Packing
from embedtrain.models.attention import (
    CPU,
    KERNEL_DTYPES,
    KERNEL_HEAD_SIZE,
    flash_attention,
    packing_limit,
    without_reads,
)
from embedtrain.models.encoder import Encoder, PooledHead, hidden_size, prepare_backbone
from embedtrain.models.vision_language import VISION_ATTENTION
from embedtrain.utils.formatting import one_line

NAME = "embedtrain_packed"
# Arguments of a model's attention that are not supported.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
# From torch 2.12 on, the kernel needs this argument for grouped heads.
_HAS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
# Window masks of texts of up to so many tokens are cached for the next layers: a megabyte each.
_MAX_CACHED_LENGTH = 1024
# The largest difference between packed and padded vectors, relative to their length.
_TOLERANCE = {Precision.fp32: 1e-3, Precision.bf16: 5e-2}
_PROBE_LENGTHS = (5, 3)
# Options with a window or chunk of attention, in tokens.
_WINDOW = re.compile(
    r"(sliding_|local_|attention_)?window(_size)?|sliding_window_size|local_attention|attention_chunk_size"
)
# The small model of `window_mismatch`, and its texts: several times as long as the windows.
_SMALL_WINDOW, _LONG_LENGTHS = 4, (14, 9)
_SMALL_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_OWN_ATTENTION = "it computes attention itself instead of through transformers' interface"

Forward = Callable[[Chunk], tuple[Tensor, ...]]


class PackingError(Exception):
    """A feature of a model's attention that does not support packing."""


@dataclass(frozen=True, slots=True)
class PackingCheck:
    """Whether a model's code supports packed texts."""

    padding_reason: str | None  # why it does not; None if it does
    dropout: float = 0.0  # the largest attention dropout in training
    head_sizes: frozenset[int] = frozenset()


def enable_packing(encoder: Encoder) -> None:
    """Make the encoder's backbone accept packed texts besides padded ones; a vision tower stays as it is."""
    _set_attention(encoder, NAME)


def disable_packing(encoder: Encoder) -> None:
    """Undo `enable_packing`."""
    _set_attention(encoder, "sdpa")
    set_packed_kernel(encoder, None)


def _set_attention(encoder: Encoder, name: str) -> None:
    for config in _configs(encoder):
        config._attn_implementation = name
    for tower in encoder.towers.values():
        if tower.vision is not None:  # whose configuration is a part of the backbone's
            tower.vision.set_attention(tower.backbone)


def set_packed_kernel(encoder: Encoder, name: str | None) -> None:
    """Choose the kernel of packed texts, by the name of `choose_flash_attention`, in all towers."""
    for part in (encoder, *encoder.towers.values()):
        part.packed_kernel = name


def check_packing(encoder: Encoder, *, precision: Precision, capability: tuple[int, int]) -> PackingCheck:
    """Run the model's code with packed texts on the meta device; the encoder stays unchanged.

    `precision` and `capability` (as of `compute_capability`) are those of the later computation. All towers with layers
    have to support packing.
    """
    if len(encoder.towers) > 1:
        layers = [tower for tower in encoder.towers.values() if tower.has_layers and tower.packs]
        checks = [check_packing(tower, precision=precision, capability=capability) for tower in layers]
        return PackingCheck(
            next((check.padding_reason for check in checks if check.padding_reason is not None), None),
            max((check.dropout for check in checks), default=0.0),
            frozenset().union(*(check.head_sizes for check in checks)),
        )
    limit = packing_limit(precision, capability)
    if limit is not None:
        return PackingCheck(limit)
    if {config._attn_implementation for config in _configs(encoder)} - {"sdpa", NAME, VISION_ATTENTION}:
        return PackingCheck(_OWN_ATTENTION)
    sizes, dropouts = list[int](), list[float]()

    def recorded(module: nn.Module, *parts: Any, packing: Packing | None = None, **kwargs: Any) -> Any:
        if packing is None:
            raise PackingError("its layers do not pass on their arguments")
        sizes.extend(part.shape[-1] for part in parts[:3])  # query, key and value
        dropouts.append(kwargs.get("dropout", 0.0))
        return packed_attention(module, *parts, packing=packing, **kwargs)

    try:
        probe = copy.deepcopy(encoder).to("meta").train()
        enable_packing(probe)
        with torch.no_grad(), _attention_is(recorded):
            probe(_chunk(torch.device("meta"), [list(range(length)) for length in _PROBE_LENGTHS]))
    except PackingError as error:
        return PackingCheck(str(error))
    except Exception as error:  # a model's own code may raise anything
        return PackingCheck(f"its code does not support packed texts ({type(error).__name__}: {one_line(error)})")
    if not sizes:
        return PackingCheck(_OWN_ATTENTION)
    unsupported = [size for size in sizes if size > KERNEL_HEAD_SIZE or size % 8]
    if capability != CPU and unsupported:
        return PackingCheck(
            f"its heads have size {unsupported[0]}, and the GPU kernel for packed texts supports multiples of 8 up to "
            f"{KERNEL_HEAD_SIZE}"
        )
    return PackingCheck(None, max(dropouts), frozenset(sizes))


def packing_mismatch(
    encoder: Forward,
    config: PretrainedConfig,
    precision: Precision,
    device: torch.device,
    *,
    token_types: bool = False,
    token_vectors: bool = False,
    lengths: tuple[int, int] = _PROBE_LENGTHS,
) -> str | None:
    """Why the vectors of packed texts differ from those of padded texts; None if they do not.

    Two texts are packed together, and each with a third one instead, which must not change a bit of its vector. Four
    forward passes without gradient, which are collectives if the encoder is sharded: every rank must call. The encoder
    has weights, no dropout, the backbone's configuration `config`, and packing enabled. With `token_types` all tokens
    of a text but the first have type 1. With `token_vectors` the encoder returns a vector of each token, and the second
    text has tokens that no token attends to. The texts have `lengths`, the longer first.
    """
    text = config.get_text_config()
    width, num_attended = lengths
    total = width + 2 * num_attended
    ids = [token for token in range(int(text.vocab_size)) if token != text.pad_token_id][:total]
    first, second = (ids * total)[:width], (ids * total)[width : width + num_attended]
    changed_first, changed_second = first[1:] + first[:1], (ids * total)[width + num_attended : total]
    filler = [ids[0]] * (width - num_attended)
    if token_vectors:
        second, changed_second = second + filler, changed_second + filler
    key_lengths = [width, num_attended] if token_vectors else None
    of_first = slice(0, width if token_vectors else 1)
    of_second = slice(of_first.stop, None)
    with torch.no_grad():
        texts = [(first, second), (changed_first, second), (first, changed_second)]
        both, other_first, other_second = (
            encoder(_chunk(device, list(pair), key_lengths, token_types=token_types))[0].float() for pair in texts
        )
        padded = torch.tensor([first, (second + filler)[:width]], device=device)
        mask = torch.arange(width, device=device) < torch.tensor([[width], [num_attended]], device=device)
        types = (torch.arange(width, device=device) > 0).long().expand_as(padded)
        rows = torch.arange(2 * width, device=device)
        separate = encoder(
            Chunk(
                padded,
                mask.long(),
                types=types if token_types else None,
                token_rows=rows if token_vectors else None,
            )
        )[0].float()
    if not torch.stack([both, other_first, other_second, separate]).isfinite().all():
        return "its vectors are not finite"  # NaN never equals NaN, so no comparison would say anything
    if not (
        torch.equal(both[of_first], other_second[of_first]) and torch.equal(both[of_second], other_first[of_second])
    ):
        return "packed texts attend to each other"
    difference = float(((both - separate).norm(dim=1) / separate.norm(dim=1)).max())
    if not difference <= _TOLERANCE[precision]:
        return f"packed vectors differ by {difference:.1%} from those of padded texts"
    return None


def window_mismatch(
    config: PretrainedConfig, precision: Precision, device: torch.device, packed_kernel: str | None = None
) -> str | None:
    """Why packed texts that are longer than the windows of a model differ from padded ones; None if they do not.

    `packing_mismatch` has short texts, because a window may have thousands of tokens. So this compares a small model of
    the same class with random weights, one layer of each type, and windows of a few tokens. None also for a model
    without windows or chunks of attention. Every rank computes the same.
    """
    text = config.get_text_config()
    values = text.to_dict()
    windows = [name for name, value in values.items() if _WINDOW.fullmatch(name) and type(value) is int]
    if not windows:
        return None
    types = list(dict.fromkeys(values.get("layer_types") or [])) or [None] * 2
    changes: dict[str, Any] = {name: size for name, size in _SMALL_SIZES.items() if name in values}
    changes |= dict.fromkeys(windows, _SMALL_WINDOW) | {"num_hidden_layers": len(types)}
    if values.get("layer_types"):
        changes["layer_types"] = types
    changes |= {name: 2 for name, value in values.items() if name.endswith("_token_id") and value is not None}
    try:
        small = type(text).from_dict(values | changes)
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            torch.manual_seed(0)
            backbone = prepare_backbone(AutoModel.from_config(small, dtype=torch.float32))
        head = PooledHead(hidden_size(small), Pooling.mean, normalize=False)
        encoder = Encoder(backbone, head).eval()
        encoder.to(device, torch.bfloat16 if precision is Precision.bf16 else torch.float32)
        enable_packing(encoder)
        encoder.packed_kernel = packed_kernel
        return packing_mismatch(encoder, small, precision, device, lengths=_LONG_LENGTHS)
    except Exception as error:  # a model's own code may raise anything
        return (
            f"texts longer than its window ({windows[0]}={values[windows[0]]}) could not be compared "
            f"({type(error).__name__}: {one_line(error)})"
        )


def _chunk(
    device: torch.device, texts: list[list[int]], key_lengths: list[int] | None = None, *, token_types: bool = False
) -> Chunk:
    lengths = [len(text) for text in texts]
    ids = torch.tensor([[token for text in texts for token in text]], device=device)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    positions = torch.tensor([[position for length in lengths for position in range(length)]], device=device)
    keys = PackedKeys.of(np.array(lengths), np.array(lengths if key_lengths is None else key_lengths))
    keys = None if keys is None else keys.map_tensors(lambda tensor: tensor.to(device))
    packing = Packing(tuple(lengths), starts, positions, keys)
    types = (positions > 0).long() if token_types else None
    return Chunk(ids, torch.ones_like(ids), packing=packing, has_padding=False, types=types)


@contextlib.contextmanager
def _attention_is(function: Callable[..., Any]) -> Iterator[None]:
    AttentionInterface.register(NAME, function)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, packed_attention)


def _configs(encoder: nn.Module) -> list[PretrainedConfig]:
    configs = [getattr(module, "config", None) for module in encoder.modules()]
    return list({id(config): config for config in configs if isinstance(config, PretrainedConfig)}.values())


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer: q, k, v [1, H, T, S] to [1, T, H, S]; k and v may have fewer heads.

    Transformers defines the parameters. A layer that needs an unsupported feature raises a PackingError.
    """
    if packing is None:
        kwargs["sliding_window"] = sliding_window
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return output
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise PackingError(f"its attention has {name}, which packed attention does not support")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    reach = _reach(causal, sliding_window, explicit=is_causal is not None)
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if q.is_cuda and v.dtype in KERNEL_DTYPES and _kernel_supports(packing.keys, causal, reach):
        return _varlen_kernel(q, k, v, packing, causal, reach, scale).unsqueeze(0), None
    if module.training or torch.is_grad_enabled():
        # torch's attention on a CPU is several times slower backward in bf16. The first of two passes over a chunk
        # has no gradient, but must equal the second one.
        q, k, v = (part if part.is_cuda or part.dtype == torch.float64 else part.float() for part in (q, k, v))
    if not torch.compiler.is_compiling():
        return _batched_runs(q, k, v, packing, causal, reach, scale, dropout).to(value.dtype).unsqueeze(0), None
    key_starts, attended = (None, None) if packing.keys is None else (packing.keys.host_starts, packing.keys.attended)
    seed = torch.randint(2**62, (), device="cpu") if dropout else None
    computed = _runs_in_graph(q, k, v, packing.host_starts, key_starts, attended, seed, causal, reach, scale, dropout)
    return computed.to(value.dtype).unsqueeze(0), None


def _reach(causal: bool, window: int | None, *, explicit: bool) -> int | None:
    """The distance up to which tokens attend to each other, as in transformers' masks; None: the whole text.

    A window counts the token itself, also in models with windows to both sides (ModernBERT, Gemma 3), except for a
    decoder made bidirectional by `is_causal` in its configuration.
    """
    if window is None:
        return None
    return window if explicit and not causal else window - 1


def _kernel_supports(keys: PackedKeys | None, causal: bool, reach: int | None) -> bool:
    """Whether the kernel for variable lengths has the masks of a layer, where some tokens are not attended to.

    It aligns the end of a text's queries with the end of its keys. With fewer keys than queries, a causal mask would
    hide the first keys from the first queries, and a window that does not cover the text would be shifted.
    """
    return keys is None or (not causal and (reach is None or keys.longest_partial <= reach + 1))


def _varlen_kernel(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, causal: bool, reach: int | None, scale: float
) -> Tensor:
    """One kernel for all texts, [T, H, S] to [T, H, S]. It has no dropout."""
    groups = q.shape[1] // k.shape[1]
    extra: dict[str, Any] = {"enable_gqa": True} if groups > 1 and _HAS_ENABLE_GQA else {}
    if groups > 1 and not extra:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    distance = -1 if reach is None else reach
    starts, longest = packing.starts, packing.longest
    window = (distance, 0 if causal else distance)
    q, k = q.to(v.dtype), k.to(v.dtype)
    key_starts, longest_keys = starts, longest
    if packing.keys is not None:
        k, v = k[packing.keys.tokens], v[packing.keys.tokens]
        key_starts, longest_keys = packing.keys.starts, packing.keys.longest
    return flash_attention(
        q, k, v, (starts, key_starts), (longest, longest_keys), scale=scale, window_size=window, **extra
    )


def _batched_runs(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, causal: bool, reach: int | None, scale: float, dropout: float
) -> Tensor:
    """Each run of texts of equal length as a batch, [T, H, S] to [T, H, S]."""
    runs = packing.runs
    sizes = [texts * length for texts, length in runs]
    # One split: each slice would create a gradient of full size, zero except for its run.
    parts = [part.split(sizes) for part in (q.to(v.dtype), k.to(v.dtype), v)]
    key_masks = _key_masks(packing)
    outputs = []
    for (texts, length), key_mask, *run in zip(runs, key_masks, *parts, strict=True):
        batch = [part.view(texts, length, *part.shape[1:]).transpose(1, 2) for part in run]
        groups = batch[0].shape[1] // batch[1].shape[1]
        narrow = reach is not None and length > reach + 1
        distance = reach if narrow else length if causal and key_mask is not None else None
        mask = None if distance is None else _shared_mask(packing, length, distance, causal, q.device)
        if key_mask is not None:
            mask = key_mask if mask is None else mask & key_mask
        output = F.scaled_dot_product_attention(
            batch[0],
            repeat_kv(batch[1], groups),
            repeat_kv(batch[2], groups),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal and mask is None,
            scale=scale,
        )
        outputs.append(output.transpose(1, 2).reshape(texts * length, output.shape[1], output.shape[3]))
    return torch.cat(outputs)


def _key_masks(packing: Packing) -> list[Tensor | None]:
    """Of each run of texts, bool [texts, 1, 1, length], true for the tokens that are attended to; None: all are."""
    runs, keys = packing.runs, packing.keys
    if keys is None:
        return [None] * len(runs)
    ends = list(itertools.accumulate(texts for texts, _ in runs))
    attended = keys.attended.split([texts * length for texts, length in runs])
    return [
        None if min(keys.lengths[end - texts : end]) == length else part.view(texts, 1, 1, length)
        for (texts, length), end, part in zip(runs, ends, attended, strict=True)
    ]


def _shared_mask(packing: Packing, length: int, reach: int, causal: bool, device: torch.device) -> Tensor:
    """The window mask, which the chunk holds until its backward pass.

    A layer that is recomputed there must not compute a mask which it found in the cache before: selective recomputation
    counts operations.
    """
    # Within a transform of torch.func the mask is a wrapper of it, which would be dead when it is next used.
    if length > _MAX_CACHED_LENGTH or torch._C._functorch.peek_interpreter_stack() is not None:
        return _window_mask.__wrapped__(length, reach, causal, device)
    key = length, reach, causal
    if key not in packing.masks:
        packing.masks[key] = _window_mask(length, reach, causal, device)
    return packing.masks[key]


# In a compiled block `_batched_runs` is one operator, whose graph does not depend on the lengths of texts. Its gradient
# computes it again, because autograd does not look into an operator.
@torch.library.custom_op("embedtrain::packed_attention", mutates_args=())
def _runs_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor | None,
    attended: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    reach: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """`_batched_runs` of offsets on the host, int32 [N + 1]; `seed`, int64 [] on the host, is that of dropout."""
    return _seeded_runs(q, k, v, starts, key_starts, attended, seed, causal, reach, scale, dropout)


@torch.library.custom_op("embedtrain::packed_attention_backward", mutates_args=())
def _gradients_of_runs(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor | None,
    attended: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    reach: int | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    others = starts, key_starts, attended, seed, causal, reach, scale, dropout
    # Not torch.autograd, which is switched off inside of operators.
    pulled = torch.func.vjp(lambda *parts: _seeded_runs(*parts, *others), q, k, v)
    of_q, of_k, of_v = (part.contiguous() for part in pulled[1](grad))
    return of_q, of_k, of_v


@_runs_in_graph.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty((*q.shape[:2], v.shape[2]))


@_gradients_of_runs.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _seeded_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor | None,
    attended: Tensor | None,
    seed: Tensor | None,
    *others: Any,
) -> Tensor:
    keys = None
    if key_starts is not None and attended is not None:
        keys = PackedKeys(tuple(key_starts.diff().tolist()), 0, key_starts, key_starts, attended)
    packing = Packing(tuple(starts.diff().tolist()), starts, starts, keys)  # as far as `_batched_runs` reads it
    if seed is None:
        return _batched_runs(q, k, v, packing, *others)
    with torch.random.fork_rng([q.device] if q.is_cuda else []):
        torch.manual_seed(int(seed))
        return _batched_runs(q, k, v, packing, *others)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.reach, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_runs(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    options = ctx.causal, ctx.reach, ctx.scale, ctx.dropout
    return (*_gradients_of_runs(grad, *ctx.saved_tensors, *options), *[None] * 8)


_runs_in_graph.register_autograd(_backward_of_runs, setup_context=_keep_inputs)


@functools.lru_cache(maxsize=64)
def _window_mask(length: int, reach: int, causal: bool, device: torch.device) -> Tensor:
    """Bool [L, L], true where a token attends to another."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance <= reach) & (distance >= (0 if causal else -reach))


def _vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cu_seq_lens_q: Packing,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` of the patches of several pictures; where the class has their boundaries, it has a packing."""
    return packed_attention(
        module, query, key, value, None, packing=cu_seq_lens_q, dropout=dropout, scaling=scaling, is_causal=False
    )


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(VISION_ATTENTION, _vision_attention)
AttentionMaskInterface.register(NAME, without_reads(sdpa_mask))
