"""Attention over texts that stand one after another without padding: each token sees those of its own text.

A model's code comes here through transformers' AttentionInterface, by a name in its configuration; none is forked. On a
GPU torch's kernel for texts of any lengths does it. Elsewhere neighbours of equal length, which is how chunks are
sorted, are seen as one batch without a copy, and go through torch's plain attention without a mask.

Without a `packing` the same name is transformers' SDPA attention, to the bit.

H heads, T tokens, S size of a head.
"""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from embedtrain.data.types import Packing

NAME = "embedtrain_packed"
# What a model may ask of attention that is not done here.
_UNKNOWN = ("softcap", "s_aux", "position_bias")
# torch 2.11's kernel computes grouped heads as it likes, from 2.12 on it asks to be told.
_TOLD_OF_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
# What the kernel takes.
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_HEAD_SIZE = 256
# Masks of windows are kept from one layer to the next for texts of up to so many tokens: a megabyte each.
_KEPT_LENGTH = 1024


class PackingError(Exception):
    """What a model asks of attention that cannot be had packed."""


def attention(
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
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: q, k, v [1, H, T, S] to [1, T, H, S]; k and v may have fewer heads.

    Raises:
        PackingError: the layer asks for what is unknown here.
    """
    if packing is None:
        others["sliding_window"] = sliding_window
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
        return found
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise PackingError(f"its attention has {name}, which packed attention has not")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    reach = _reach(causal, sliding_window, said=is_causal is not None)
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if q.is_cuda and v.dtype in KERNEL_DTYPES:
        return _by_kernel(q, k, v, packing, causal, reach, scale).unsqueeze(0), None
    if module.training or torch.is_grad_enabled():
        # torch's attention on a CPU is several times slower backward in bf16. The first of two passes over a chunk
        # has no gradient, and has to be what the second one is.
        q, k, v = (part if part.is_cuda else part.float() for part in (q, k, v))
    return _by_runs(q, k, v, packing, causal, reach, scale, dropout).to(value.dtype).unsqueeze(0), None


def _reach(causal: bool, window: int | None, *, said: bool) -> int | None:
    """How many tokens away a token sees, as transformers' masks have it; None: all of its text.

    Of those before it a window holds the token itself; so does one to both sides (ModernBERT, Gemma 3), but where a
    decoder is told to look both ways, by `is_causal` in its configuration.
    """
    if window is None:
        return None
    return window if said and not causal else window - 1


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_kernel(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, causal: bool, reach: int | None, scale: float
) -> Tensor:
    """One kernel for all, [T, H, S] to [T, H, S]. It has no dropout, which whoever chooses it says."""
    groups = q.shape[1] // k.shape[1]
    told: dict[str, Any] = {"enable_gqa": True} if groups > 1 and _TOLD_OF_GROUPS else {}
    if groups > 1 and not told:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    far = -1 if reach is None else reach
    starts, longest = packing.starts, packing.longest
    window = (far, 0 if causal else far)
    q, k = q.to(v.dtype), k.to(v.dtype)
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=window, **told)
    assert isinstance(out, Tensor)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_runs(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, causal: bool, reach: int | None, scale: float, dropout: float
) -> Tensor:
    """Each run of texts of one length as a batch, [T, H, S] to [T, H, S]."""
    runs = packing.runs
    sizes = [texts * length for texts, length in runs]
    # Split at once: slices would each make a gradient of the whole, zeros but for a run.
    parts = [part.split(sizes) for part in (q.to(v.dtype), k.to(v.dtype), v)]
    out = []
    for (texts, length), *run in zip(runs, *parts, strict=True):
        batch = [part.view(texts, length, *part.shape[1:]).transpose(1, 2) for part in run]
        groups = batch[0].shape[1] // batch[1].shape[1]
        narrow = reach is not None and length > reach + 1
        kept = _window if length <= _KEPT_LENGTH else _window.__wrapped__
        mask = kept(length, reach, causal, q.device) if narrow and reach is not None else None
        seen = F.scaled_dot_product_attention(
            batch[0],
            repeat_kv(batch[1], groups),
            repeat_kv(batch[2], groups),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal and mask is None,
            scale=scale,
        )
        out.append(seen.transpose(1, 2).reshape(texts * length, seen.shape[1], seen.shape[3]))
    return torch.cat(out)


@functools.lru_cache(maxsize=64)
def _window(length: int, reach: int, causal: bool, device: torch.device) -> Tensor:
    """Which token sees which, bool [L, L]."""
    places = torch.arange(length, device=device)
    back = places[:, None] - places[None, :]
    return (back <= reach) & (back >= (0 if causal else -reach))


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
