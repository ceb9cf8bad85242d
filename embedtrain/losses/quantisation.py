"""Codes of one or eight bits per dimension, and the ranges of training's vectors that a loss quantises with.

Shapes: n vectors, D dimensions.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embedtrain.config.evaluation import VectorPrecision

_STEPS = 255
# How far the ranges of a batch move the smoothed ones.
_UPDATE = 0.01
_NAME = re.compile(r"(?:.+\.)?ranges\.(\d+)")


@dataclass(frozen=True, slots=True)
class Ranges:
    """The smallest and the largest value of each dimension, float32 [D]."""

    low: Tensor
    high: Tensor

    @property
    def steps(self) -> Tensor:
        """The width of a step of each dimension; 1 where all values are equal."""
        steps = (self.high - self.low) / _STEPS
        return torch.where(steps == 0, 1, steps)

    def to(self, device: torch.device) -> "Ranges":
        """The same on a device."""
        return Ranges(self.low.to(device), self.high.to(device))


@dataclass(frozen=True, slots=True)
class Quantiser:
    """What turns vectors into codes; `ranges` are for int8 and uint8."""

    precision: VectorPrecision
    ranges: Ranges | None = None

    def encode(self, vectors: Tensor) -> Tensor:
        """Codes of [n, D]: uint8 or int8; -1 and 1 as int8 for `binary`, whose packed bits they stand for."""
        if self.precision is VectorPrecision.binary:
            return torch.where(vectors > 0, 1, -1).to(torch.int8)
        ranges = self._ranges(vectors.device)
        codes = ((vectors.float() - ranges.low) / ranges.steps).floor().clamp(0, _STEPS)
        return codes.to(torch.uint8) if self.precision is VectorPrecision.uint8 else (codes - 128).to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        """What codes [n, D] stand for, float32."""
        if self.precision is VectorPrecision.binary:
            return codes.float()
        ranges = self._ranges(codes.device)
        first = 0 if self.precision is VectorPrecision.uint8 else -128
        return ranges.low + (codes.float() - first + 0.5) * ranges.steps

    def _ranges(self, device: torch.device) -> Ranges:
        assert self.ranges is not None, f"{self.precision.value} needs ranges"
        return self.ranges.to(device)


def straight_through(vectors: Tensor, quantiser: Quantiser) -> Tensor:
    """What the codes of unit vectors [n, D] stand for, with the gradient of the vectors themselves.

    Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons" (2013). Bits become numbers of
    size 1 / sqrt(D), a unit vector again: with -1 and 1, a loss of cosines would have a gradient that is sqrt(D) times
    smaller than that of the float vectors.
    """
    values = quantiser.decode(quantiser.encode(vectors.detach())).to(vectors.dtype)
    if quantiser.precision is VectorPrecision.binary:
        values = values / math.sqrt(vectors.shape[1])
    return values + (vectors - vectors.detach())  # adds 0: the values are exact


class SmoothedRanges(nn.Module):
    """Ranges of the vectors of global batches, by the number of dimensions, and of layers if they are not all.

    They are those of the first batch, then r <- 0.99 r + 0.01 r_batch for each further one. A checkpoint holds them as
    buffers of the loss.
    """

    def add(self, dimension: int, layer: int | None = None) -> None:
        """Prepare ranges for vectors of so many dimensions."""
        if _buffer(dimension, layer) not in self._buffers:
            self.register_buffer(_buffer(dimension, layer), torch.full((2, dimension), torch.nan))

    @torch.no_grad()
    def update(self, vectors: Sequence[Tensor], layer: int | None = None) -> Ranges:
        """The ranges after the vectors of a batch, several [n, D] on this rank. A collective."""
        dimension = vectors[0].shape[1]
        smoothed = self.get_buffer(_buffer(dimension, layer))
        # Of the values and their negatives: the minima of both need one collective.
        extremes = torch.full_like(smoothed, torch.inf)
        for part in vectors:
            if len(part):
                local = torch.stack([part.amin(dim=0), -part.amax(dim=0)])
                extremes = torch.minimum(extremes, local.to(extremes.dtype))
        dist.all_reduce(extremes, op=dist.ReduceOp.MIN)
        of_batch = torch.stack([extremes[0], -extremes[1]])
        smoothed.copy_(torch.where(smoothed.isnan(), of_batch, torch.lerp(smoothed, of_batch, _UPDATE)))
        return Ranges(smoothed[0], smoothed[1])


def _buffer(dimension: int, layer: int | None) -> str:
    return str(dimension) if layer is None else f"layer{layer}_{dimension}"


def ranges_dimension(name: str) -> int | None:
    """The number of dimensions of the ranges that are stored under this name in a state dict; None for others.

    Those of the first layers are others: they are not of the exported model.
    """
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])
