"""What a run trains and saves: its progress, the module of encoder and loss, and the average of the weights."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.snapshot import checkpointed_weights
from embedtrain.distributed.sharding import reshard
from embedtrain.losses.types import Loss
from embedtrain.models.encoder import Encoder


@dataclass(slots=True)
class MetricMean:
    """The mean of a metric over the steps that have it."""

    total: float | None = 0.0  # None: not finite, which JSON does not have
    steps: int = 0

    def add(self, value: float) -> None:
        """Add a step."""
        total = math.nan if self.total is None else self.total + value
        self.total, self.steps = total if math.isfinite(total) else None, self.steps + 1

    @property
    def value(self) -> float:
        """The mean; NaN if a value was not finite."""
        return math.nan if self.total is None else self.total / max(1, self.steps)


@dataclass(slots=True)
class TrainState:
    """Progress of a run, saved in every checkpoint.

    It contains no random state: the order of the data and all dropout masks are functions of the seed and the step, so
    these numbers suffice to resume exactly, on any number of ranks.
    """

    step: int = 0  # completed optimizer steps
    samples: int = 0  # rows consumed
    best_by: str | None = None
    best: float | None = None  # best value of that metric so far
    best_step: int | None = None  # its step
    not_better: int = 0  # evaluations since then
    evaluation_due: bool = False  # whether a stop interrupted the evaluation of this step, which is repeated on resume
    tracker_ids: dict[str, str] = field(default_factory=dict)  # what continues the run in each tracker, by its option
    # Of the steps since the last logged one, so that the row of a run that resumes between two has all of its steps.
    means: dict[str, MetricMean] = field(default_factory=dict)

    def add_to_means(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        for name, value in metrics.items():
            self.means.setdefault(name, MetricMean()).add(value)

    def pop_means(self) -> dict[str, float]:
        """The mean of each metric over the steps since the last call that have it."""
        means, self.means = self.means, {}
        return {name: mean.value for name, mean in means.items()}


def as_dict(state: TrainState) -> dict[str, Any]:
    """Plain values for a checkpoint's index."""
    return asdict(state)


class EncoderWithLoss(nn.Module):
    """Encoder and loss in one module, so that one checkpoint contains both; never called itself.

    FSDP gathers weights around the call of the encoder, and the loss is called with embeddings.
    """

    def __init__(self, encoder: Encoder, loss: Loss) -> None:
        super().__init__()
        self.encoder, self.loss = encoder, loss


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
        copies: dict[tuple[int, torch.Size | int], Tensor] = {}  # tied weights have one average
        self.tensors: dict[str, Tensor] = {}  # by the names of a checkpoint; what is not trained is the tensor itself
        live: dict[tuple[int, torch.Size | int], Tensor] = {}
        for name, weight in weights.items():
            if _key(weight) not in parameters:
                self.tensors[name] = weight
                continue
            live.setdefault(_key(weight), weight)
            average = copies.setdefault(_key(weight), weight.detach().clone())
            # A model may share a number with the loss, in another shape.
            self.tensors[name] = average if average.shape == weight.shape else average.view(weight.shape)
        self._live = [_local(weight) for weight in live.values()]
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


def _key(tensor: Tensor) -> tuple[int, torch.Size | int]:
    """The same for tensors that share their memory; shards without rows have none."""
    return _local(tensor).data_ptr(), tensor.shape if isinstance(tensor, DTensor) else tensor.numel()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
