"""A moving average of the weights, on the shards of each rank."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.snapshot import checkpointed_weights
from embedtrain.distributed.sharding import reshard


class WeightAverage:
    """The exponential moving average of the trained weights: e <- d e + (1 - d) w after each step, in fp32.

    d is `decay`, and at step t, counted from 0, at most (1 + t) / (10 + t), so that the first weights leave the average
    soon. Updates are elementwise on local rows, without communication. `wait_for_staging` is called before weights
    change, because an asynchronous checkpoint may still be copying them.
    """

    def __init__(self, trained: nn.Module, decay: float, wait_for_staging: Callable[[], None] = lambda: None) -> None:
        self._module, self._decay, self._wait_for_staging = trained, decay, wait_for_staging
        weights = checkpointed_weights(trained)
        parameters = {_key(parameter) for parameter in trained.parameters() if parameter.requires_grad}
        copies: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights have one average
        self.tensors: dict[str, Tensor] = {}  # by the names of a checkpoint; what is not trained is the tensor itself
        for name, weight in weights.items():
            is_trained = _key(weight) in parameters
            self.tensors[name] = copies.setdefault(_key(weight), weight.detach().clone()) if is_trained else weight
        by_key = {_key(weight): weight for weight in weights.values()}
        self._live = [_local(by_key[key]) for key in copies]
        self._averages = [_local(copy) for copy in copies.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step `step`, counted from 0."""
        decay = min(self._decay, (1 + step) / (10 + step))
        if self._averages:
            torch._foreach_lerp_(self._averages, self._live, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their average; collectives that read the weights see the average after it."""
        reshard(self._module)
        self._wait_for_staging()
        for live, average in zip(self._live, self._averages, strict=True):
            weight = live.clone()
            live.copy_(average)
            average.copy_(weight)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The average in place of the weights during the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


def _key(tensor: Tensor) -> tuple[int, torch.Size]:
    """The same for tensors that share their memory; shards without rows have none."""
    return _local(tensor).data_ptr(), tensor.shape


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
