"""Which of torch's kernels compute attention on a GPU, and what they support."""

import contextlib

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig

from embedtrain.config.recipe import Precision

# Limits of `varlen_attn`.
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_HEAD_SIZE = 256
KERNEL_CAPABILITY = (8, 0)  # Ampere
CPU = (0, 0)  # the compute capability of no GPU

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


def grad_independent_attention(encoder: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which torch computes the attention of padded texts by the same kernel with and without gradients.

    A pass without gradients and its replay with gradients must have the same dropout and rounding. For large heads,
    torch rejects FlashAttention (compute capability 8.6, 8.9, 12) and cuDNN (9, 10) only if gradients are needed, so
    neither is used here. The context has to cover the backward pass too, which may recompute activations.
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
