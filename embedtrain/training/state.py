"""TrainState: what a checkpoint holds beside model and optimiser."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from embedtrain.losses.types import Loss
from embedtrain.models.encoder import Encoder


@dataclass(slots=True)
class TrainState:
    """Where a run stands.

    There is no random state: the order of the data and every dropout mask are functions of the seed and the
    step, so these numbers are all it takes to go on exactly, on any number of ranks.
    """

    step: int = 0  # optimiser steps done
    samples: int = 0  # rows consumed
    best_by: str | None = None  # `checkpoint.best_metric`, and
    best: float | None = None  # the best value of it so far
    best_step: int | None = None
    not_better: int = 0  # evaluations since the best one
    evaluation_due: bool = False  # the evaluation of this step was left, and comes first when the run goes on
    wandb_id: str | None = None


def as_dict(state: TrainState) -> dict[str, Any]:
    """The state as plain values, for a checkpoint's manifest."""
    return asdict(state)


def from_dict(values: Mapping[str, Any]) -> TrainState:
    """The state out of a manifest; what this version does not know is left out."""
    known = {field.name for field in fields(TrainState)}
    return TrainState(**{name: value for name, value in values.items() if name in known})


class EncoderWithLoss(nn.Module):
    """Encoder and loss side by side, so that one optimiser and one checkpoint hold both.

    Nobody calls it: the encoder is called by itself, for FSDP gathers weights around its own `__call__`, and
    the loss is given vectors.

    Args:
        encoder: sharded.
        loss: whole on every rank.
    """

    def __init__(self, encoder: Encoder, loss: Loss) -> None:
        super().__init__()
        self.encoder, self.loss = encoder, loss
