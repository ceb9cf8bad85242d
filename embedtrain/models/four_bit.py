"""Frozen linear layers in 4 bits, by bitsandbytes (Dettmers et al., "QLoRA", 2023): NF4 with quantised scales.

Their weights are neither parameters nor in any state dict: they are not sharded but whole on every rank (half a byte a
weight), not saved, and made anew from the model's files whenever it is loaded.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FourBitLinear(nn.Module):
    """A frozen linear layer [..., in] -> [..., out]; `quantize_weight` gives it its weight.

    Args:
        linear: the layer in whose place it stands; its bias stays as it is.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed: Tensor
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        self._scales: Any = None

    @property
    def num_bytes(self) -> int:
        """What it takes on every rank: 4 bits a weight, 8 for every 64 of them, and little more for these."""
        return round(self.in_features * self.out_features * (1 / 2 + 1 / 64 + 4 / (64 * 256)))

    def quantize_weight(self, weight: Tensor) -> None:
        """Quantise a weight [out, in] that lies where the layer is to compute."""
        self.packed, self._scales = _quantised(weight)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that is computed with, [out, in]."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.packed, self._scales).to(dtype)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        found: Tensor = _Linear.apply(x, self)  # type: ignore[no-untyped-call]
        return found if self.bias is None else found + self.bias.to(found.dtype)


class _Linear(torch.autograd.Function):
    """x W^T with W unpacked for each pass, so that between two of them nothing but the 4 bits is held.

    Not bitsandbytes' own product, which looks for a kernel on the Hub where a CPU computes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (slope,) = slopes
        return slope @ ctx.layer.dequantized(slope.dtype), None


def quantize_frozen(encoder: nn.Module) -> None:
    """Put a FourBitLinear in the place of every linear layer of the backbone that is not trained, in place."""
    for parent in list(encoder.backbone.modules()):  # type: ignore[union-attr]
        for name, child in parent.named_children():
            if type(child) is nn.Linear and not any(parameter.requires_grad for parameter in child.parameters()):
                setattr(parent, name, FourBitLinear(child))


def four_bit_layers(encoder: nn.Module) -> Iterator[tuple[str, FourBitLinear]]:
    """Every such layer, by the encoder's name of its weight."""
    for name, part in encoder.named_modules():
        if isinstance(part, FourBitLinear):
            yield f"{name}.weight", part


def quantization_round_trip(weight: Tensor) -> Tensor:
    """A weight [out, in] as it is after `quantize_weight` and `dequantized`, float32."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(*_quantised(weight)).float()  # type: ignore[no-any-return]


def _quantised(weight: Tensor) -> tuple[Tensor, Any]:
    from bitsandbytes.functional import quantize_4bit

    packed, scales = quantize_4bit(
        weight.detach().float().contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return packed, scales
