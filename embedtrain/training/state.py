"""What a run trains and saves: the progress of the run, and the module of encoder and loss."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

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
    wandb_id: str | None = None  # id of the wandb run to continue
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
