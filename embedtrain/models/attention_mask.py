"""Attention masks of padded texts, created without reading the device.

Whether a mask is needed depends on the padding, which the host knows. Transformers reads it from the mask instead
(`padding_mask.all()`), so the host would wait for the GPU in every forward pass. A model calls these functions for each
kind of its layers, with full or sliding-window attention, so no list of architectures is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

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
