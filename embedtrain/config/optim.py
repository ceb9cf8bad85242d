"""Options of the optimizer and of the learning rate as a function of the step, with their checks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from embedtrain.config.options import Effect, check_values, option
from embedtrain.config.validation import OptionChecks

MAX_BETA2_OF_BF16 = 0.99
# Elements of a row that share a scale in moments of 8 bits. Scales of smaller blocks would take as much as is saved.
MAX_BLOCK, MIN_BLOCK = 256, 64
_SCALE_BYTES = 4


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


class OptimizerName(str, Enum):
    """How gradients become updates.

    `adamw` is AdamW. `stable_adamw` divides the learning rate of a tensor by the RMS of g / sqrt(v) if that is above 1
    (Wortsman et al., 2023). `lion` uses the sign of a momentum (Chen et al., 2023): lower `lr` and raise `weight_decay`
    by a factor of 3 to 10, with `betas=[0.9,0.99]`. `muon` makes the momentum of each matrix of the blocks orthogonal
    (Jordan et al., 2024); embeddings, heads, norms, biases and adapters have AdamW.
    """

    adamw = "adamw"
    stable_adamw = "stable_adamw"
    lion = "lion"
    muon = "muon"


class StateDtype(str, Enum):
    """The type of the moments."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


class MuonDtype(str, Enum):
    """The type of the matrix products of muon."""

    fp32 = "fp32"
    bf16 = "bf16"


@dataclass(kw_only=True)
class ParameterGroup:
    """Parameters with settings of their own, an element of `optim.groups`."""

    # Regular expression that is searched in a parameter's name, which `inspect` and a group without a match print:
    # `backbone.` and the names of transformers, `dense.` of heads, `loss.` of the loss.
    match: str
    name: str | None = None  # in notes and metrics (`lr/NAME`); default: match
    # peak learning rate; 0: these parameters are not trained
    lr: float | None = option(None, at_least=0, hint="0 does not train these parameters")
    # the same as a factor of optim.lr
    lr_scale: float | None = option(None, at_least=0, hint="0 does not train these parameters")
    # of all of the group's parameters; null: optim.weight_decay, of matrices only
    weight_decay: float | None = option(None, at_least=0)
    # They stay unchanged, moments included, until this step: below 1 a fraction of all steps, from 1 a number of steps.
    freeze_until: float | None = option(None, at_least=0, hint="null trains them from the first step on")

    @property
    def label(self) -> str:
        """The name in notes and metrics."""
        return self.match if self.name is None else self.name


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer, its schedule and gradient clipping."""

    name: OptimizerName = option(OptimizerName.adamw, resume=Effect.must_match)
    # the peak learning rate, at the end of warm-up; models of billions of weights: 1e-6 to 2e-5
    lr: float = option(5e-5, above=0)
    weight_decay: float = option(0.01, at_least=0)  # of matrices; biases and norms are not decayed
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # decay rates of the two moments
    eps: float = option(1e-8, above=0)  # added to the root of the second moment
    # Of the moments. bf16 halves their memory and needs betas=[0.9,0.99]; int8 leaves a quarter of it: codes of 8 bits
    # with a scale for each block of a row.
    state_dtype: StateDtype = StateDtype.fp32
    momentum: float = 0.95  # of muon
    muon_dtype: MuonDtype = MuonDtype.fp32  # of muon's products of matrices; bf16 depends on the kernel of the device
    # norm of the gradient of the whole model; null: no clipping
    max_grad_norm: float | None = option(1.0, above=0, hint="null switches clipping off")
    schedule: ScheduleKind = ScheduleKind.linear
    warmup: float = option(0.05, at_least=0)  # below 1 a fraction of all steps, from 1 a number of steps
    # length of the decay of wsd: below 1 a fraction of all steps, from 1 a number of steps
    decay: float = option(0.1, above=0)
    decay_shape: DecayShape = DecayShape.linear
    power: float = option(1.0, above=0, hint="1 is linear")  # exponent of polynomial
    # the learning rate does not fall below this fraction of lr after warm-up
    min_lr_ratio: float = option(0.0, within=(0, 1), hint="it is a fraction of optim.lr")
    # all steps, as the schedule counts them; null: those of the run
    schedule_steps: int | None = option(None, at_least=1, hint="null takes all steps of the run")
    # Decay of a moving average of the weights, such as 0.999, which is evaluated and exported; null: none.
    ema: float | None = option(None, within=(0, 0.9999999), hint="such as 0.999; null keeps no average")
    # Of L blocks, counted from 0, block l has lr * layer_decay^(L - l), embeddings lr * layer_decay^(L + 1).
    layer_decay: float | None = option(
        None, within=(0.01, 1), hint="such as 0.9; null gives all layers the same learning rate"
    )
    groups: list[ParameterGroup] = field(default_factory=list)  # of each parameter the first that matches

    def state_bytes(self, shape: Sequence[int], *, in_block: bool = False) -> float:
        """Bytes of moments and of `ema` for each weight of a trained parameter; `in_block`: it is one of a block."""
        is_muon = self.name is OptimizerName.muon and in_block and len(shape) == 2
        moments = 1 if is_muon or self.name is OptimizerName.lion else 2
        return moments * self._moment_bytes(shape) + (0 if self.ema is None else 4)

    def _moment_bytes(self, shape: Sequence[int]) -> float:
        match self.state_dtype:
            case StateDtype.bf16:
                return 2
            case StateDtype.int8 if (block := block_size(shape)) is not None:
                return 1 + _SCALE_BYTES / block
            case _:
                return 4


def block_size(shape: Sequence[int]) -> int | None:
    """How many elements of a row share a scale in moments of 8 bits; None: such a parameter's moments stay fp32.

    Blocks divide a row, because ranks and checkpoints hold whole rows. Biases, norms and matrices with short rows, such
    as the second one of LoRA, have no blocks.
    """
    if len(shape) != 2:
        return None
    columns = shape[1]
    return next((size for size in range(min(MAX_BLOCK, columns), MIN_BLOCK - 1, -1) if columns % size == 0), None)


def check_optim(optim: OptimConfig) -> None:
    """Raise a ConfigError for an option that cannot work."""
    check = OptionChecks(optim, "optim.")
    check.require(
        len(optim.betas) == 2 and all(0 <= beta < 1 for beta in optim.betas),
        "betas",
        "must be two numbers from 0 to below 1, such as [0.9,0.999]",
    )
    check.require(
        optim.state_dtype is not StateDtype.bf16 or optim.betas[1] <= MAX_BETA2_OF_BF16,
        "betas",
        f"optim.state_dtype=bf16 rounds changes of a moment below 1/512 away, so the second one must be at most "
        f"{MAX_BETA2_OF_BF16}, such as [0.9,0.99]",
    )
    check.require(0 <= optim.momentum < 1, "momentum", "must be from 0 to below 1, such as 0.95")
    for name in ("momentum", "muon_dtype"):
        check.require(
            optim.name is OptimizerName.muon or getattr(optim, name) == getattr(OptimConfig, name),
            name,
            f"is for optim.name=muon, not {optim.name.value}",
        )
    _check_schedule(optim, check)
    _check_groups(optim.groups)


def _check_groups(groups: list[ParameterGroup]) -> None:
    labels = [group.label for group in groups]
    for index, group in enumerate(groups):
        check = OptionChecks(group, f"optim.groups[{index}].")
        check_values(group, f"optim.groups[{index}].")
        try:
            is_pattern = bool(re.compile(group.match)) and bool(group.match)
        except (re.error, RecursionError, OverflowError):
            is_pattern = False
        check.require(is_pattern, "match", "must be a regular expression, such as '^dense\\.' or 'embed'")
        name = "match" if group.name is None else "name"
        check.require(
            labels.index(group.label) == index, name, f"is also that of optim.groups[{labels.index(group.label)}]"
        )
        check.require(
            group.lr is None or group.lr_scale is None, "lr_scale", f"is set beside lr={group.lr}; set one of them"
        )
        options = (group.lr, group.lr_scale, group.weight_decay, group.freeze_until)
        check.require(options != (None,) * 4, "match", "sets nothing; write lr, lr_scale, weight_decay or freeze_until")


def _check_schedule(optim: OptimConfig, check: OptionChecks) -> None:
    kind = optim.schedule
    check.require(
        kind is not ScheduleKind.inverse_sqrt or optim.warmup > 0,
        "warmup",
        "optim.schedule=inverse_sqrt falls from the end of warm-up on, so it needs one",
    )
    for name, schedule in (("decay", "wsd"), ("decay_shape", "wsd"), ("power", "polynomial")):
        is_default = getattr(optim, name) == getattr(OptimConfig, name)
        check.require(is_default or kind.value == schedule, name, f"is for optim.schedule={schedule}, not {kind.value}")
    check.require(
        optim.min_lr_ratio == 0 or kind is not ScheduleKind.constant,
        "min_lr_ratio",
        "has no effect with optim.schedule=constant; leave it out",
    )
