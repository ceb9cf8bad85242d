"""Frozen linear layers in 4 bits, by bitsandbytes (Dettmers et al., "QLoRA", 2023): NF4 with quantised scales.

Their weights are neither parameters nor in any state dict: they are not sharded (every rank holds half a byte per
weight), not saved, and quantised from the model's files on every load.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FourBitLinear(nn.Module):
    """A frozen linear layer [..., in] -> [..., out] with the bias of `linear`; `quantize_weight` sets its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed: Tensor
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        self._scales: Any = None

    @property
    def num_bytes(self) -> int:
        """Memory on every rank: 4 bits per weight, 8 bits for every 64 weights, and the scales of these."""
        return round(self.in_features * self.out_features * (1 / 2 + 1 / 64 + 4 / (64 * 256)))

    def quantize_weight(self, weight: Tensor) -> None:
        """Quantise a weight [out, in] on the device of the layer."""
        self.packed, self._scales = _quantize(weight)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] used in the forward pass."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.packed, self._scales).to(dtype)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        output: Tensor = _Linear.apply(x, self)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Linear(torch.autograd.Function):
    """x W^T with W dequantised for each pass, so that only the 4 bits are held between passes.

    bitsandbytes' own product looks for a kernel on the Hub when it runs on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.dequantized(grad.dtype), None


def quantize_frozen(encoder: nn.Module) -> None:
    """Replace, in place, every frozen linear layer of the backbone by a FourBitLinear."""
    for parent in list(encoder.backbone.modules()):  # type: ignore[union-attr]
        for name, child in parent.named_children():
            if type(child) is nn.Linear and not any(parameter.requires_grad for parameter in child.parameters()):
                setattr(parent, name, FourBitLinear(child))


def four_bit_layers(encoder: nn.Module) -> Iterator[tuple[str, FourBitLinear]]:
    """Every FourBitLinear, by the name of its weight."""
    for name, part in encoder.named_modules():
        if isinstance(part, FourBitLinear):
            yield f"{name}.weight", part


def quantization_round_trip(weight: Tensor) -> Tensor:
    """A weight [out, in] quantised and dequantised again, float32."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(*_quantize(weight)).float()  # type: ignore[no-any-return]


def _quantize(weight: Tensor) -> tuple[Tensor, Any]:
    from bitsandbytes.functional import quantize_4bit

    values = weight.detach().float().contiguous()
    packed, scales = quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
    return packed, scales
