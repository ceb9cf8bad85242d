"""Attention of padded texts without reading the device, and which of torch's kernels compute it on a GPU.

Whether a mask is needed depends on the padding, which the host knows. Transformers reads it from the mask instead
(`padding_mask.all()`), so the host would wait for the GPU in every forward pass. A model calls these functions for each
kind of its layers, with full or sliding-window attention, so no list of architectures is needed.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import eager_mask, sdpa_mask

from embedtrain.config.recipe import Precision

# Of the forward pass in this thread; None outside of an Encoder: transformers' own behaviour.
_HAS_PADDING: ContextVar[bool | None] = ContextVar("has_padding", default=None)

# Whether masks are computed by broadcasting, without vmap, which torch.onnx cannot trace.
_BROADCASTS: ContextVar[bool] = ContextVar("broadcasts", default=False)

MaskFunction = Callable[..., Tensor | None]


@contextmanager
def known_padding(has_padding: bool) -> Iterator[None]:
    """Whether the texts of the forward pass inside have padding."""
    token = _HAS_PADDING.set(has_padding)
    try:
        yield
    finally:
        _HAS_PADDING.reset(token)


@contextmanager
def traceable_masks() -> Iterator[None]:
    """Compute masks as torch.onnx can trace them, also those of decoders that attend in both directions."""
    token = _BROADCASTS.set(True)
    try:
        yield
    finally:
        _BROADCASTS.reset(token)


def without_reads(function: MaskFunction) -> MaskFunction:
    """The same function of transformers' AttentionMaskInterface, with equal results, that reads no tensor."""

    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        if _BROADCASTS.get():
            kwargs["use_vmap"] = False
        has_padding = _HAS_PADDING.get()
        if has_padding is None or attention_mask is None:
            return function(*args, attention_mask=attention_mask, **kwargs)
        if not has_padding:
            return function(*args, attention_mask=None, **kwargs)
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return function(*args, attention_mask=attention_mask, **kwargs)

    return mask


AttentionMaskInterface.register("sdpa", without_reads(sdpa_mask))
AttentionMaskInterface.register("eager", without_reads(eager_mask))


# Limits of `varlen_attn`.
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_HEAD_SIZE = 256
KERNEL_CAPABILITY = (8, 0)  # Ampere
CPU = (0, 0)  # the compute capability of no GPU

FLASH_ATTENTION_3 = "FA3"  # torch's name
# What `varlen_attn` does besides FlashAttention. torch 2.14 takes cuDNN where it can, and has no switch; cuDNN cannot
# have a window, and FlashAttention takes one that covers the texts for none. From 2.15 on it obeys `sdpa_kernel`.
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_PREFERS_CUDNN, _OBEYS_SDPA_KERNEL = _TORCH == (2, 14), _TORCH >= (2, 15)
_WHOLE_TEXT = 1 << 20  # tokens, more than any text has
_HOPPER = (9, 0)
# Up to this size of heads, torch selects the kernel of SDPA independently of gradients (its sdp_utils.cpp).
_MAX_GRAD_INDEPENDENT_HEAD_SIZE = 128


def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, such as (9, 0); `CPU` if the device is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else CPU


def packing_limit(precision: Precision, capability: tuple[int, int]) -> str | None:
    """Why devices of this compute capability cannot compute packed texts in this precision; None if they can."""
    if capability == CPU:
        return None
    if capability < KERNEL_CAPABILITY:
        version, required = (".".join(map(str, pair)) for pair in (capability, KERNEL_CAPABILITY))
        return (
            f"the kernel for packed texts needs a GPU of compute capability {required} or above, and this is {version}"
        )
    if precision is Precision.fp32:
        return "the GPU kernel for packed texts supports only bf16, and parallel.precision=fp32"
    return None


def choose_flash_attention(device: torch.device, head_sizes: Iterable[int]) -> str | None:
    """The kernel of a model's packed texts, by torch's name; None: torch's own, FlashAttention 2.

    FlashAttention 3 on Hopper if its package is installed, except with deterministic algorithms, which it does not
    support for all models. The selection of this process stays as it is.
    """
    if (
        compute_capability(device) != _HOPPER
        or torch.are_deterministic_algorithms_enabled()
        or importlib.util.find_spec("flash_attn_interface") is None
    ):
        return None
    try:
        use_flash_attention(FLASH_ATTENTION_3)
        for size in head_sizes:
            _try_kernel(device, size)
    except Exception:  # a package for another version of torch or CUDA, or built without some sizes of heads
        return None
    finally:
        use_flash_attention(None)
    return FLASH_ATTENTION_3


# What `use_flash_attention` has selected: what had been selected before, by the user's own program for example.
_replaced: dict[str | None, str | None] = {}


def use_flash_attention(name: str | None) -> None:
    """Select a model's kernel, by the name of `choose_flash_attention`, for the passes that follow in this process.

    None leaves what the program itself has selected, torch's default otherwise.

    torch has one selection for all models, which padded texts have as well, and FlashAttention 3 raises for dropout. So
    each encoder selects its own before a pass, which costs nothing while all have the same.
    """
    current = current_flash_attention_impl()
    before = _replaced.get(current, current)
    wanted = before if name is None else name
    if current == wanted:
        return
    _replaced.clear()
    if name is not None:
        _replaced[name] = before
    if wanted is None:
        restore_flash_attention_impl(_raise_warn=False)  # no public way is silent, as of torch 2.15
    else:
        activate_flash_attention_impl(wanted)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    window_size: tuple[int, int],
    **options: Any,
) -> Tensor:
    """Torch's `varlen_attn` by FlashAttention, whatever kernels are enabled around it: [T, H, S] to [T, H, S].

    Otherwise torch prefers cuDNN for chunks with a text of more than 128 tokens, on some GPUs and without a window: the
    rounding of a text would depend on the texts beside it, and on whether gradients are needed.

    Args:
        starts: offsets of the texts among the queries and among the keys, and the ends: int32 [N + 1] each.
        longest: tokens of the longest text, of queries and of keys.
        window_size: tokens before and after that a token attends to; -1: all.
        options: further ones of `varlen_attn`.
    """
    if _PREFERS_CUDNN and window_size == (-1, -1):
        window_size = (_WHOLE_TEXT, _WHOLE_TEXT)
    if _OBEYS_SDPA_KERNEL:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = varlen_attn(q, k, v, *starts, *longest, window_size=window_size, **options)
    else:
        output = varlen_attn(q, k, v, *starts, *longest, window_size=window_size, **options)
    assert isinstance(output, Tensor)
    return output


def _try_kernel(device: torch.device, head_size: int) -> None:
    """A forward and a backward pass of one text."""
    text = torch.zeros(16, 1, head_size, dtype=torch.bfloat16, device=device, requires_grad=True)
    starts = torch.arange(0, 32, 16, dtype=torch.int32, device=device)
    flash_attention(text, text, text, (starts, starts), (16, 16), window_size=(-1, -1)).sum().backward()


def grad_independent_attention(encoder: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which torch computes the attention of padded texts by the same kernel with and without gradients.

    A pass without gradients and its replay with gradients must have the same dropout and rounding. For large heads,
    torch rejects FlashAttention (compute capability 8.6, 8.9, 12) and cuDNN (9, 10) only if gradients are needed, so
    neither is used here. The context has to cover the backward pass too, which may recompute activations. Packed texts
    within it have the kernel of `flash_attention`.
    """
    config = getattr(getattr(encoder, "backbone", None), "config", None)
    if not isinstance(config, PretrainedConfig) or _head_size(config) <= _MAX_GRAD_INDEPENDENT_HEAD_SIZE:
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _head_size(config: PretrainedConfig) -> int:
    """0 if the configuration does not have it."""
    text = config.get_text_config()
    size, num_heads = (getattr(text, name, None) for name in ("hidden_size", "num_attention_heads"))
    return getattr(text, "head_dim", None) or (size // num_heads if size and num_heads else 0)
