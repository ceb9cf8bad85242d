"""The learning rate as a function of the step alone: nothing to save, and a resumed run computes the same values."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from embedtrain.config.optim import OptimConfig, ScheduleKind
from embedtrain.config.recipe import Recipe, TrainConfig
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.utils.formatting import format_count
from embedtrain.utils.records import read_record

# Past steps of a resumed run whose learning rates are compared.
_COMPARED_STEPS = 1000


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """The number of steps of `optim.warmup`."""
    return num_steps(optim.warmup, optim.schedule_steps or total_steps)


def decay_steps(optim: OptimConfig, total_steps: int) -> int:
    """The number of steps of `optim.decay`: at least one, and at most those after warm-up."""
    total = optim.schedule_steps or total_steps
    return max(1, min(num_steps(optim.decay, total), total - warmup_steps(optim, total_steps)))


def num_steps(length: float, total_steps: int) -> int:
    """A length in steps: below 1 a fraction of all steps, from 1 a number of steps."""
    return round(length if length >= 1 else length * total_steps)


class LearningRate:
    """The learning rate of `optim`, which every parameter group scales by a factor of its own."""

    def __init__(self, optim: OptimConfig, total_steps: int) -> None:
        self.optim = optim
        self.total_steps = optim.schedule_steps or total_steps
        self.warmup_steps = warmup_steps(optim, total_steps)
        is_wsd = optim.schedule is ScheduleKind.wsd
        num_decaying = decay_steps(optim, total_steps) if is_wsd else self.total_steps - self.warmup_steps
        self._num_decaying = max(1, num_decaying)

    def __call__(self, step: int) -> float:
        """That of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.optim.lr * (step + 1) / self.warmup_steps
        floor = self.optim.min_lr_ratio
        if self.optim.schedule is ScheduleKind.inverse_sqrt:
            return self.optim.lr * max(floor, math.sqrt(max(1, self.warmup_steps) / (step + 1)))
        # The decay reaches 0 after the last step, so that the last step still trains.
        left = min(1.0, max(0.0, (self.total_steps - step) / self._num_decaying))
        return self.optim.lr * (floor + (1.0 - floor) * self._shape(left))

    def _shape(self, left: float) -> float:
        """The factor between peak and floor; `left` falls from 1 to 0 during the decay."""
        kind = self.optim.schedule
        match ScheduleKind(self.optim.decay_shape.value) if kind is ScheduleKind.wsd else kind:
            case ScheduleKind.linear:
                return left
            case ScheduleKind.cosine:
                return 0.5 * (1.0 - math.cos(math.pi * left))
            case ScheduleKind.sqrt:
                return 1.0 - math.sqrt(1.0 - left)
            case ScheduleKind.polynomial:
                return float(left**self.optim.power)
            case _:
                return 1.0


def require_rates(optim: OptimConfig, total_steps: int) -> None:
    """Raise ConfigError if the schedule ends before the run and the last steps would have a learning rate of 0."""
    if total_steps > 1 and LearningRate(optim, total_steps)(total_steps - 1) == 0.0:
        raise ConfigError(
            f"optim.schedule_steps={optim.schedule_steps}: the run has {format_count(total_steps, 'step')}, and the "
            f"learning rate of the last ones would be 0; set optim.min_lr_ratio or schedule_steps={total_steps}"
        )


def schedule_warnings(optim: OptimConfig, total_steps: int) -> list[str]:
    """Warnings about a warm-up of half of the steps or more, and a decay that does not fit after it."""
    warnings = []
    warmup, length = warmup_steps(optim, total_steps), optim.schedule_steps or total_steps
    if warmup > 1 and 2 * warmup >= total_steps:  # a single step has the peak learning rate
        warnings.append(
            f"the warm-up takes {warmup:,} steps and the run has {format_count(total_steps, 'step')}: the model may "
            "learn little; write optim.warmup=0.05 for 5% of the steps"
        )
    if optim.schedule is ScheduleKind.wsd and num_steps(optim.decay, length) > length - warmup:
        warnings.append(
            f"optim.decay={optim.decay:g} does not fit into the {format_count(max(0, length - warmup), 'step')} after "
            f"warm-up: the learning rate decays from the end of warm-up on"
        )
    return warnings


def schedule_change(
    saved: Mapping[str, Any], recipe: Recipe, done: int, count_steps: Callable[[Recipe], int]
) -> str | None:
    """A note if the recipe's schedule would have given the first `done` steps other learning rates than they had.

    Args:
        saved: the recipe of the checkpoint that contains these steps.
        count_steps: all steps of a recipe.

    Raises CheckpointError if the saved options cannot be read.
    """
    try:
        before = replace(
            recipe,
            optim=read_record(OptimConfig, saved.get("optim", {})),
            train=read_record(TrainConfig, saved.get("train", {})),
        )
    except ValueError as error:
        raise CheckpointError(f"the recipe in the checkpoint of step {done} is damaged: {error}") from None
    if (before.train.steps is None) == (before.train.epochs is None):
        return None
    earlier, now = (LearningRate(run.optim, count_steps(run)) for run in (before, recipe))
    compared = [*range(0, done, max(1, done // _COMPARED_STEPS)), done - 1]
    differing = next((step for step in compared if not math.isclose(earlier(step), now(step), rel_tol=1e-9)), None)
    if differing is None:
        return None
    return (
        f"the schedule now gives other learning rates to steps that are done, from step {differing + 1} on: step "
        f"{done} had {earlier(done - 1):.3g}, now it would have {now(done - 1):.3g}, and step {done + 1} has "
        f"{now(done):.3g}; optim.schedule=wsd can be extended until its decay begins"
    )
