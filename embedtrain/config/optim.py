"""Options of the optimizer and of the learning rate as a function of the step, with their checks."""

from dataclasses import dataclass, field
from enum import Enum

from embedtrain.config.validation import OptionChecks


class ScheduleKind(str, Enum):
    """The learning rate after warm-up.

    u runs from 0 to 1 over the steps after warm-up: `linear` is 1 - u, `cosine` (1 + cos(pi u)) / 2, `sqrt`
    1 - sqrt(u), `polynomial` (1 - u)^power. `wsd` (warm-up, stable, decay) is constant until the last `decay` steps.
    `inverse_sqrt` is sqrt(W / s) at step s, after W steps of warm-up.
    """

    linear = "linear"
    cosine = "cosine"
    constant = "constant"
    sqrt = "sqrt"
    inverse_sqrt = "inverse_sqrt"
    polynomial = "polynomial"
    wsd = "wsd"


class DecayShape(str, Enum):
    """The decay at the end of `schedule=wsd`, as the schedules of the same names."""

    linear = "linear"
    cosine = "cosine"
    sqrt = "sqrt"


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW, its schedule and gradient clipping."""

    lr: float = 2e-5  # the peak learning rate, at the end of warm-up
    weight_decay: float = 0.01  # of matrices; biases and norms are not decayed
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # decay rates of the two moments
    eps: float = 1e-8  # added to the root of the second moment
    max_grad_norm: float | None = 1.0  # norm of the gradient of the whole model; null: no clipping
    schedule: ScheduleKind = ScheduleKind.linear
    warmup: float = 0.05  # below 1 a fraction of all steps, from 1 a number of steps
    decay: float = 0.1  # length of the decay of wsd: below 1 a fraction of all steps, from 1 a number of steps
    decay_shape: DecayShape = DecayShape.linear
    power: float = 1.0  # exponent of polynomial
    min_lr: float | None = None  # the learning rate does not fall below it after warm-up; null: min_lr_ratio
    min_lr_ratio: float | None = None  # the same as a fraction of lr; null: 0
    schedule_steps: int | None = None  # all steps, as the schedule counts them; null: those of the run
    loss_lr: float | None = None  # learning rate of the loss's parameters (a temperature, a classifier); default: lr

    @property
    def floor(self) -> float:
        """The lowest learning rate after warm-up, as a fraction of the peak."""
        return self.min_lr / self.lr if self.min_lr is not None else self.min_lr_ratio or 0.0


def check_optim(optim: OptimConfig) -> None:
    """Raise a ConfigError for an option that cannot work."""
    check = OptionChecks(optim, "optim.")
    check.positive("lr")
    check.positive("loss_lr", "null takes optim.lr")
    check.require(
        len(optim.betas) == 2 and all(0 <= beta < 1 for beta in optim.betas),
        "betas",
        "must be two numbers from 0 to below 1, such as [0.9,0.999]",
    )
    check.positive("eps")
    check.at_least(0, "weight_decay")
    check.positive("max_grad_norm", "null switches clipping off")
    _check_schedule(optim, check)


def _check_schedule(optim: OptimConfig, check: OptionChecks) -> None:
    kind = optim.schedule
    check.at_least(0, "warmup")
    check.require(
        kind is not ScheduleKind.inverse_sqrt or optim.warmup > 0,
        "warmup",
        "optim.schedule=inverse_sqrt falls from the end of warm-up on, so it needs one",
    )
    check.positive("decay")
    check.positive("power", "1 is linear")
    for name, schedule in (("decay", "wsd"), ("decay_shape", "wsd"), ("power", "polynomial")):
        is_default = getattr(optim, name) == getattr(OptimConfig, name)
        check.require(is_default or kind.value == schedule, name, f"is for optim.schedule={schedule}, not {kind.value}")
    check.within(0, optim.lr, "min_lr", "optim.lr is the peak")
    check.within(0, 1, "min_lr_ratio", "it is a fraction of optim.lr")
    check.require(
        optim.min_lr is None or optim.min_lr_ratio is None,
        "min_lr_ratio",
        f"is the same limit as optim.min_lr={optim.min_lr}; set one of them",
    )
    for name in ("min_lr", "min_lr_ratio"):
        check.require(
            getattr(optim, name) is None or kind is not ScheduleKind.constant,
            name,
            "has no effect with optim.schedule=constant; leave it out",
        )
    check.at_least(1, "schedule_steps", "null takes all steps of the run")
