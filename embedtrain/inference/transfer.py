"""Copies between host and device during which neither waits for the other."""

import torch
from torch import Tensor

from embedtrain.data.types import Chunk


def pinned(tokens: Chunk, device: torch.device) -> Chunk:
    """A chunk in the memory from which `device` copies while it computes."""
    return tokens.map_tensors(torch.Tensor.pin_memory) if device.type == "cuda" else tokens


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory on `device`; a copy from pageable memory would wait for what was launched before."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor in host memory, made while the device continues to compute; a tensor on the CPU itself."""

    def __init__(self, tensor: Tensor) -> None:
        # Operations on the device after this line see the copy without `wait`: they run in the same order.
        self.tensor = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The copy, once the host may read it."""
        if self._event is not None:
            self._event.synchronize()
        return self.tensor
