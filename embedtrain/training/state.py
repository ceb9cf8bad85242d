"""TrainState: what a checkpoint holds beside model and optimiser."""

from dataclasses import dataclass


@dataclass(slots=True)
class TrainState:
    """Where a run stands.

    There is no random state: the order of the data and every dropout mask are functions of the seed and the
    step, so these numbers are all it takes to go on exactly, on any number of ranks.
    """

    step: int = 0  # optimiser steps done
    samples: int = 0  # rows consumed
    best: float | None = None  # the best value so far of the metric in `checkpoint.best`
    best_step: int | None = None
    wandb_id: str | None = None
