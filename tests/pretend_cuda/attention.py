"""The kernel for packed texts (`torch.nn.attention.varlen.varlen_attn`) by its formula, and what it accepts.

T: tokens; L, M: queries and keys of a text; H, K: heads of queries, and of keys and values; S: size of a head.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

# As torch 2.15 says which kernel it has selected.
FLASH = SDPBackend.FLASH_ATTENTION.value


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, longest: int, longest_k: int,
    causal: bool = False, scale: float | None = None, window: Sequence[int] | None = None, gqa: bool = False,
    used: Tensor | None = None, blocks: Tensor | None = None, splits: int | None = None, kernel: int = FLASH,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output [T, H, S], log-sum-exp [H, T] and random state of the kernel.

    q is [T, H, S]; k and v have the K heads of their own tokens, [T', K, S].
    """
    _check(q, k, v, starts, starts_k, longest, longest_k)
    assert used is None and blocks is None and splits is None, "not supported here"
    assert kernel == FLASH, "cuDNN"
    assert gqa or q.shape[1] == k.shape[1], "more heads of queries than of keys need enable_gqa"
    outputs, sums = [], []
    for text, of_keys in zip(_texts(starts), _texts(starts_k), strict=True):
        queries, keys, values = _heads(q[text], k[of_keys], v[of_keys])
        groups = queries.shape[0] // keys.shape[0]
        scores = _scores(queries, keys.repeat_interleave(groups, 0), scale, window, causal)
        outputs.append((scores.softmax(-1) @ values.repeat_interleave(groups, 0)).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs).to(q.dtype), torch.cat(sums, 1), torch.zeros(2, dtype=torch.uint64)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, sums: Tensor, starts: Tensor, starts_k: Tensor,
    longest: int, longest_k: int, causal: bool, random_state: Tensor, scale: float | None = None,
    window: Sequence[int] | None = None, kernel: int = FLASH,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k and v, in float32 without autograd, which is switched off inside a dispatch mode."""
    _check(q, k, v, starts, starts_k, longest, longest_k)
    grads = [torch.zeros_like(part) for part in (q, k, v)]
    for text, of_keys in zip(_texts(starts), _texts(starts_k), strict=True):
        queries, keys, values, d_out = _heads(q[text], k[of_keys], v[of_keys], grad[text])
        heads, groups = keys.shape[0], queries.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
        weights = _scores(queries, keys, scale, window, causal).softmax(-1)
        d_weights = d_out @ values.transpose(1, 2)
        factor = queries.shape[-1] ** -0.5 if scale is None else scale
        d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * factor
        parts = (d_scores @ keys, d_scores.transpose(1, 2) @ queries, weights.transpose(1, 2) @ d_out)
        of_parts = zip(grads, parts, (text, of_keys, of_keys), (len(queries), heads, heads), strict=True)
        for into, part, tokens, num_heads in of_parts:
            # The heads of queries that share a head of keys add up.
            into[tokens] = part.unflatten(0, (num_heads, -1)).sum(1).transpose(0, 1).to(into.dtype)
    return tuple(grads)


def _texts(starts: Tensor) -> Iterator[slice]:
    bounds = starts.tolist()
    return map(slice, bounds, bounds[1:])


def _heads(*parts: Tensor) -> Iterator[Tensor]:
    """Tokens [L, H, S] as heads [H, L, S], in float32."""
    return (part.float().transpose(0, 1) for part in parts)


def _scores(q: Tensor, k: Tensor, scale: float | None, window: Sequence[int] | None, causal: bool) -> Tensor:
    """[H, L, S] and [H, M, S] to [H, L, M]; -inf where a token does not attend to another."""
    # The last query is at the last key, as in FlashAttention.
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])[None, :] + k.shape[1] - q.shape[1]
    left, right = (-1, -1) if window is None else window
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed &= distance <= left
    if right >= 0 or causal:
        allowed &= -distance <= max(right, 0)
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~allowed, -torch.inf)


def _check(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, longest: int, longest_k: int) -> None:
    """What the kernel refuses, or computes wrongly without a word."""
    wrong = []
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        wrong.append(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        wrong.append(f"a head of size {q.shape[-1]}")
    if any(part.stride(-1) != 1 for part in (q, k, v)):
        wrong.append(f"strides {q.stride()}, {k.stride()}, {v.stride()}")
    for bounds, most, tokens in ((starts, longest, len(q)), (starts_k, longest_k, len(k))):
        if bounds.dtype != torch.int32 or not bounds.is_contiguous() or bounds.dim() != 1:
            wrong.append(f"cu_seq {bounds.dtype} {tuple(bounds.shape)}")
        elif int(bounds[0]) or int(bounds[-1]) != tokens or int(bounds.diff().min()) < 0:
            wrong.append(f"cu_seq {bounds.tolist()} for {tokens} tokens")
        elif int(bounds.diff().max()) > most:
            wrong.append(f"texts of {int(bounds.diff().max())} tokens, but max {most}")
    if wrong:
        raise RuntimeError(f"varlen_attn: {'; '.join(wrong)}")
