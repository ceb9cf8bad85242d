"""The temperature of a loss: fixed, or trained within bounds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """A temperature, fixed or trained as the logarithm of its inverse (Radford et al., 2021, "CLIP").

    Args:
        value: to begin with.
        trained: whether it is a parameter.
        bounds: smallest and largest value when trained.
    """

    def __init__(self, value: float, *, trained: bool, bounds: Sequence[float] = (0.0, math.inf)) -> None:
        super().__init__()
        self.lowest, self.highest = (-math.log(bound) for bound in reversed(bounds)) if trained else (0.0, 0.0)
        start = torch.tensor([-math.log(value)], dtype=torch.float64)
        # Shape (1,): FSDP takes no scalars. Float64 where it is fixed: the logarithm must not cost digits.
        self.log_scale = nn.Parameter(start.float()) if trained else None
        self.fixed = 1.0 / value

    def scale(self, like: Tensor) -> Tensor:
        """One over the temperature, [1], of the type of `like`; differentiable where it is trained."""
        if self.log_scale is None:
            return like.new_tensor([self.fixed])
        with torch.no_grad():  # here and not after a step: a value that is clamped as it is used stays trainable
            self.log_scale.clamp_(self.lowest, self.highest)
        return self.log_scale.exp().to(like.dtype)
