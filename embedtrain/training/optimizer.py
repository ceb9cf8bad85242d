"""Optimizers over sharded parameters: groups with settings of their own, AdamW and other rules, clipping by the norm.

torch's fused AdamW, or `ShardedOptimizer`: moments in bf16 and int8, StableAdamW, Lion and Muon, on the shards of
FSDP2. All but Muon are elementwise on the local rows, apart from one sum per tensor of StableAdamW: the number of ranks
only changes rounding. Moments are computed in fp32, whatever type they are stored in.

The 8-bit optimizers of torchao and bitsandbytes divide the flattened shard of a rank into blocks, and keep a shard that
does not fill them in fp32: what is stored, and in which type, depends on the number of ranks. Neither leaves a step out
whose gradient is not finite. Here blocks divide rows, which any number of ranks shards.

Muon makes each matrix orthogonal as a whole, on one rank, whatever the number of ranks. The iteration of Newton and
Schulz needs the whole matrix; on a shard of its rows it would have another result. Ranks send their rows of each matrix
to its owner, which computes and returns rows of the result to the ranks that hold them.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.snapshot import SCALES, SIGNED, UNSIGNED, decode_moment, encode_moment
from embedtrain.config.optim import MuonDtype, OptimConfig, OptimizerName, ParameterGroup, StateDtype, block_size
from embedtrain.distributed.collectives import exchange_rows
from embedtrain.errors import ConfigError
from embedtrain.models.adapters import base_name
from embedtrain.models.blocks import find_blocks
from embedtrain.models.encoder import TowerEncoder
from embedtrain.models.sparse_head import QUERY_WEIGHTS, QUERY_WEIGHTS_LR
from embedtrain.training.schedule import LearningRate, num_steps
from embedtrain.utils.formatting import format_count

ENCODER, LOSS, EMBEDDINGS, LAYERS = "encoder", "loss", "embeddings", "layers"
QUERIES = "query_weights"
_BACKBONE, _OF_LOSS = "backbone.", "loss."
_MAX_NAMES = 5  # in a message
# Entries of a group of the optimizer besides torch's. They follow from the recipe, and are not read from checkpoints.
LR_FACTOR, FREEZE_UNTIL, LABEL, RULE = "lr_factor", "freeze_until", "label", "rule"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the parameters of one group have in common."""

    label: str  # in notes and metrics
    lr_factor: float  # of the learning rate of the schedule
    weight_decay: float
    freeze_until: float = 0.0  # a step; below 1 a fraction of all steps
    of_loss: bool = False
    rule: OptimizerName = OptimizerName.adamw


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A trained parameter under the name that `optim.groups` matches."""

    name: str
    parameter: nn.Parameter
    settings: Settings


def trained_parameters(encoder: nn.Module, optim: OptimConfig, loss: nn.Module | None = None) -> list[TrainedParameter]:
    """All trained parameters of the encoder, sharded or on the meta device, and of the loss, with their settings.

    Raises ConfigError if a group matches none, or if an option has no parameters that it applies to.
    """
    named = [(name, parameter) for name, parameter in encoder.named_parameters() if parameter.requires_grad]
    of_loss = [] if loss is None else [(n, p) for n, p in loss.named_parameters(_OF_LOSS[:-1]) if p.requires_grad]
    names = [name for name, _ in (*named, *of_loss)]
    groups = _matches(names, optim.groups, loss is None)
    decays = {} if optim.layer_decay is None else _layer_factors(encoder, optim.layer_decay)
    rules = _matrices_of_blocks(encoder) if optim.name is OptimizerName.muon else {}
    if optim.name is OptimizerName.muon and not any(name in rules for name, _ in named):
        raise ConfigError("optim.name=muon: the model trains no matrices of its blocks; write optim.name=adamw")
    trained = []
    for name, parameter in named:
        label, factor = decays.get(name, (ENCODER, 1.0))
        if name == QUERY_WEIGHTS:
            label, factor = QUERIES, QUERY_WEIGHTS_LR / optim.lr
        settings = _settings(groups.get(name), optim, parameter, label, factor)
        trained.append(TrainedParameter(name, parameter, replace(settings, rule=rules.get(name, settings.rule))))
    for name, parameter in of_loss:
        settings = _settings(groups.get(name), optim, parameter, LOSS, 1.0, of_loss=True)
        trained.append(TrainedParameter(name, parameter, settings))
    return trained


def _settings(
    group: ParameterGroup | None,
    optim: OptimConfig,
    parameter: nn.Parameter,
    label: str,
    factor: float,
    *,
    of_loss: bool = False,
) -> Settings:
    """Those of the first group that matches, else those of the part of the model."""
    decay = optim.weight_decay if parameter.dim() > 1 else 0.0
    rule = OptimizerName.adamw if optim.name is OptimizerName.muon else optim.name
    if group is None:
        return Settings(label, factor, decay, of_loss=of_loss, rule=rule)
    if group.lr is not None:
        factor = group.lr / optim.lr
    elif group.lr_scale is not None:
        factor = group.lr_scale
    decay = decay if group.weight_decay is None else group.weight_decay
    return Settings(group.label, factor, decay, group.freeze_until or 0.0, of_loss, rule)


def _matches(names: Sequence[str], groups: Sequence[ParameterGroup], without_loss: bool) -> dict[str, ParameterGroup]:
    """The first group that matches, by name of the parameter."""
    patterns = [(re.compile(group.match), group) for group in groups]
    matches = {name: next((group for pattern, group in patterns if pattern.search(name)), None) for name in names}
    for index, (pattern, group) in enumerate(patterns):
        if any(match is group for match in matches.values()):
            continue
        others = [name for name in names if pattern.search(name)]
        if others:
            earlier = next(number for number, other in enumerate(groups) if other is matches[others[0]])
            problem = f"optim.groups[{earlier}] matches its parameters before it; move it to the front"
        elif without_loss and pattern.search(_OF_LOSS):  # plans have no loss
            continue
        else:
            problem = f"matches no trained parameter; the model has {_listed(names)}"
        raise ConfigError(f"optim.groups[{index}].match={group.match}: {problem}")
    return {name: group for name, group in matches.items() if group is not None}


def _listed(names: Sequence[str]) -> str:
    step = max(1, len(names) // _MAX_NAMES)
    return ", ".join(names[::step][:_MAX_NAMES]) + ", ..." * (len(names) > _MAX_NAMES)


def _layer_factors(encoder: nn.Module, decay: float) -> dict[str, tuple[str, float]]:
    """Label and factor of the embeddings and blocks, by name of the parameter; other parameters have the factor 1."""
    if isinstance(encoder, TowerEncoder):
        of_towers = {prefix: _layer_factors(tower, decay) for prefix, tower in encoder.towers.items()}
        return {prefix + name: factor for prefix, own in of_towers.items() for name, factor in own.items()}
    blocks = find_blocks(encoder, required=False)
    if not blocks:
        raise ConfigError(f"optim.layer_decay={decay}: the model has no list of repeated layers; leave it out")
    depths = {id(parameter): depth for depth, block in enumerate(blocks) for parameter in block.parameters()}
    factors: dict[str, tuple[str, float]] = {}
    is_before = True  # parameters before the first block belong to the embeddings, later ones are final norms
    for name, parameter in encoder.named_parameters():
        depth = depths.get(id(parameter))
        is_before = is_before and depth is None
        if depth is not None:
            factors[name] = LAYERS, decay ** (len(blocks) - depth)
        elif name.startswith(_BACKBONE) and (is_before or "embed" in name):
            factors[name] = EMBEDDINGS, decay ** (len(blocks) + 1)
    return factors


def _matrices_of_blocks(encoder: nn.Module) -> dict[str, OptimizerName]:
    """Names of the parameters that Muon updates: embeddings and adapters have two dimensions too."""
    blocks = find_blocks(encoder, required=False)
    of_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {
        name: OptimizerName.muon
        for name, parameter in encoder.named_parameters()
        if id(parameter) in of_blocks and parameter.dim() == 2 and "embed" not in name and base_name(name) is not None
    }


def optimizer_groups(trained: Sequence[TrainedParameter]) -> Iterator[dict[str, object]]:
    """Groups for a torch optimizer.

    A group never has parameters of the encoder and of the loss: the latter are plain tensors, which the fused optimizer
    cannot update together with shards.
    """
    groups: dict[Settings, list[nn.Parameter]] = {}
    for of_loss in (False, True):
        part = [item for item in trained if item.settings.of_loss is of_loss]
        for item in sorted(part, key=lambda item: item.parameter.dim() <= 1):  # matrices first
            groups.setdefault(item.settings, []).append(item.parameter)
    for settings, parameters in groups.items():
        yield {
            "params": parameters,
            "weight_decay": settings.weight_decay,
            LR_FACTOR: settings.lr_factor,
            FREEZE_UNTIL: settings.freeze_until,
            LABEL: settings.label,
            RULE: settings.rule.value,
        }


def describe_groups(trained: Sequence[TrainedParameter], optim: OptimConfig) -> dict[str, str]:
    """Numbers of parameters and settings by label; empty if the recipe sets no groups."""
    by_label: dict[str, list[TrainedParameter]] = {}
    for item in trained:
        is_muon = item.settings.rule is OptimizerName.muon
        by_label.setdefault(item.settings.label + " (muon)" * is_muon, []).append(item)
    if by_label.keys() <= {ENCODER, LOSS}:
        return {}
    return {label: _described(items, optim) for label, items in by_label.items()}


def _described(items: Sequence[TrainedParameter], optim: OptimConfig) -> str:
    settings = [item.settings for item in items]
    count = sum(item.parameter.numel() for item in items)
    freeze = settings[0].freeze_until
    text = (
        f"{format_count(count, 'parameter')} in {format_count(len(items), 'tensor')}, "
        f"lr {_range([optim.lr * setting.lr_factor for setting in settings])}, "
        f"weight decay {_range([setting.weight_decay for setting in settings])}"
    )
    if not freeze:
        return text
    return f"{text}, frozen until step {freeze:g}" if freeze >= 1 else f"{text}, frozen for {freeze:.0%} of the steps"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def logged_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """`lr/LABEL` of the groups whose learning rate is not the encoder's, if all their parameters have the same."""
    rates: dict[str, set[float]] = {}
    factors: dict[str, set[float]] = {}
    for group in optimizer.param_groups:
        label = str(group.get(LABEL, ENCODER))
        rates.setdefault(label, set()).add(float(group["lr"]))
        factors.setdefault(label, set()).add(float(group.get(LR_FACTOR, 1.0)))
    is_special = {label: label not in (ENCODER, LOSS) or factors[label] != {1.0} for label in rates}
    return {f"lr/{label}": max(values) for label, values in rates.items() if is_special[label] and len(values) == 1}


def build_optimizer(encoder: nn.Module, optim: OptimConfig, loss: nn.Module | None = None) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters of `encoder` and `loss`; by default only matrices decay.

    Call it after sharding and before any forward pass that leaves weights unsharded; otherwise the optimizer holds
    tensors that are not the trained ones.
    """
    groups = list(optimizer_groups(trained_parameters(encoder, optim, loss)))
    if optim.name is not OptimizerName.adamw or optim.state_dtype is not StateDtype.fp32:
        return ShardedOptimizer(groups, optim)
    beta1, beta2 = optim.betas
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)


class Schedule:
    """The optimizer, with the learning rates of all parameter groups at every step, and the limit of the norm."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig, total_steps: int) -> None:
        self.optimizer, self.total_steps, self.max_grad_norm = optimizer, total_steps, optim.max_grad_norm
        self.rate = LearningRate(optim, total_steps)

    def apply(self, step: int) -> float:
        """Set the learning rates of step `step`, counted from 0, and return the encoder's."""
        rate = self.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0 if self._is_frozen(group, step) else rate * group.get(LR_FACTOR, 1.0)
        return rate

    def drop_frozen_gradients(self, step: int) -> None:
        """Leave parameters that are frozen at step `step`, and their moments, as they are: they have no gradient.

        Gradients are still reduced, so that the units of FSDP never change, but they count in no norm.
        """
        for group in self.optimizer.param_groups:
            if self._is_frozen(group, step):
                for parameter in group["params"]:
                    parameter.grad = None

    def _is_frozen(self, group: Mapping[str, Any], step: int) -> bool:
        until = group.get(FREEZE_UNTIL, 0.0)
        return bool(step < num_steps(until, self.total_steps))


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; return the norm before.

    The norm is that of the full gradient over all shards, the same number on every rank. It stays on the device of the
    shards, so that nothing waits for it; with `parallel.cpu_offload` that is the CPU, while the loss is on the GPU.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    plain = [grad for grad in grads if not isinstance(grad, DTensor)]  # of the loss
    # Not the DTensors: of an operation on all of them at once it derives the layouts, which takes 0.7 seconds of the
    # first step for two hundred weights.
    shards = [grad.to_local() for grad in sharded]
    norms: list[Tensor] = []
    if shards:
        squares = torch.nn.utils.get_total_norm(shards).square()
        dist.all_reduce(squares, group=sharded[0].device_mesh["shard"].get_group())
        norms.append(squares.sqrt())
    if plain:
        norms.append(torch.nn.utils.get_total_norm(plain))
    norm = torch.stack([part.to(norms[0].device) for part in norms]).norm() if norms else torch.zeros(())
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        for part in filter(None, (shards, plain)):
            torch._foreach_mul_(part, scale.to(part[0].device))
    return norm


def step_if(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take a step if the boolean `finite`, of no dimension, is true; otherwise weights and state do not change.

    The value is not read, so the step of a GPU is queued before anything is known: fused AdamW leaves everything
    unchanged if its attribute `found_inf` is 1, as `ShardedOptimizer` does. GradScaler sets it in the same way (torch
    2.11 to 2.15).
    """
    # With parallel.cpu_offload the step runs on the CPU. torch would copy the value without waiting for it.
    shard = optimizer.param_groups[0]["params"][0]
    optimizer.found_inf = finite.logical_not().float().to(shard.device)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


# What has no blocks stays in fp32 with int8.
_DTYPES = {StateDtype.fp32: torch.float32, StateDtype.bf16: torch.bfloat16, StateDtype.int8: torch.float32}
_MATMUL_DTYPES = {MuonDtype.fp32: torch.float32, MuonDtype.bf16: torch.bfloat16}
# Elements of a parameter that are updated at a time, because rules have about ten temporary tensors of as many.
_PIECE = 1 << 23
STEP, MOMENT, SECOND_MOMENT, MOMENTUM = "step", "exp_avg", "exp_avg_sq", "momentum_buffer"
_STATE = {
    OptimizerName.adamw: (MOMENT, SECOND_MOMENT),
    OptimizerName.stable_adamw: (MOMENT, SECOND_MOMENT),
    OptimizerName.lion: (MOMENT,),
    OptimizerName.muon: (MOMENTUM,),
}


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups have a rule each; `found_inf` works as that of fused AdamW.

    If the attribute `found_inf` is set to a tensor that is not 0, a step leaves weights and state unchanged. The host
    never reads it.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], optim: OptimConfig) -> None:
        super().__init__(groups, {"lr": optim.lr})
        self._optim = optim

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state before the first step, sharded as the parameter."""
        rule = next(self._rule(group) for group in self.param_groups if any(p is parameter for p in group["params"]))
        return self._initial_state(parameter, rule)

    def _initial_state(self, parameter: nn.Parameter, rule: OptimizerName) -> dict[str, Tensor]:
        is_encoded = self._optim.state_dtype is StateDtype.int8
        block, dtype = block_size(parameter.shape) if is_encoded else None, _DTYPES[self._optim.state_dtype]
        state: dict[str, Tensor] = {}
        for name in _STATE[rule]:
            if block is None:
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                of_codes = UNSIGNED if name == SECOND_MOMENT else SIGNED
                state[name] = torch.zeros_like(parameter, dtype=of_codes, requires_grad=False)
                columns = parameter.detach()[:, : parameter.shape[1] // block]
                state[name + SCALES] = torch.zeros_like(columns, dtype=dtype, memory_format=torch.contiguous_format)
        if SECOND_MOMENT in state:
            state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return state

    @staticmethod
    def _rule(group: dict[str, Any]) -> OptimizerName:
        return OptimizerName(group[RULE])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            rule = self._rule(group)
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = self._initial_state(parameter, rule)
            match rule:
                case OptimizerName.adamw:
                    self._adamw(parameters, group)
                case OptimizerName.stable_adamw:
                    self._stable_adamw(parameters, group)
                case OptimizerName.lion:
                    self._lion(parameters, group)
                case OptimizerName.muon:
                    self._muon(parameters, group)

    def _replace(self, target: Tensor, value: Tensor) -> None:
        """Set the local rows, unless the step is to have no effect."""
        if self.found_inf is None:
            target.copy_(value)
        else:
            target.copy_(torch.where(self.found_inf.to(target.device) == 0, value.to(target.dtype), target))

    def _store(self, state: dict[str, Tensor], name: str, moment: Tensor) -> None:
        """Store a moment in the type of the state."""
        if (scales := state.get(name + SCALES)) is None:
            self._replace(state[name], moment)
        else:
            codes, new = encode_moment(moment, moment.shape[1] // scales.shape[1], state[name].dtype)
            self._replace(state[name], codes)
            self._replace(scales, new)

    def _pieces(self, parameter: nn.Parameter) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Local rows of a parameter, its gradient and its state, not more than `_PIECE` elements at a time."""
        weight, grad, state = _local(parameter), _local(_grad(parameter)), self._local_state(parameter)
        if weight.numel() <= _PIECE:
            yield weight, grad, state
            return
        count = max(1, _PIECE * len(weight) // weight.numel())
        for start in range(0, len(weight), count):
            rows = slice(start, start + count)
            yield weight[rows], grad[rows], {name: value[rows] for name, value in state.items()}

    def _local_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {name: _local(value) for name, value in self.state[parameter].items() if name != STEP}

    def _moments(self, grad: Tensor, state: dict[str, Tensor], step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The new moments of Adam, its direction, and the unbiased second moment."""
        beta1, beta2 = self._optim.betas
        moment = _moment(state, MOMENT).lerp(grad, 1 - beta1)
        second = beta2 * _moment(state, SECOND_MOMENT) + (1 - beta2) * grad.square()
        unbiased = second / (1 - beta2**step)
        return moment, second, moment / (1 - beta1**step) / (unbiased.sqrt() + self._optim.eps), unbiased

    def _adamw(
        self, parameters: list[nn.Parameter], group: dict[str, Any], divisors: Iterable[Tensor | float] | None = None
    ) -> None:
        """AdamW; `divisors` of the learning rate of each parameter."""
        for parameter, divisor in zip(parameters, divisors or [1.0] * len(parameters), strict=True):
            step = self.state[parameter][STEP] + 1
            for weight, grad, state in self._pieces(parameter):
                moment, second, direction, _ = self._moments(grad, state, step)
                self._store(state, MOMENT, moment)
                self._store(state, SECOND_MOMENT, second)
                self._update(weight, direction, group["lr"] / divisor, group["weight_decay"])
            self._replace(self.state[parameter][STEP], step)

    def _stable_adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        # The mean of g^2 / v of each tensor over all its rows: one collective for all tensors. Directions are computed
        # again after it, because those of all tensors would take as much memory as moments in fp32.
        ratios = []
        for parameter in parameters:
            step, parts = self.state[parameter][STEP] + 1, []
            for _, grad, state in self._pieces(parameter):
                *_, unbiased = self._moments(grad, state, step)
                parts.append((grad.square() / unbiased.clamp(min=self._optim.eps**2)).sum())
            ratios.append(torch.stack(parts).sum() if len(parts) > 1 else parts[0])
        sums = torch.stack(ratios)
        if isinstance(parameters[0], DTensor):
            mesh = parameters[0].device_mesh
            total = sums.to(mesh.device_type)
            dist.all_reduce(total, group=mesh["shard"].get_group())
            sums = total.to(sums.device)
        rms = [(total / parameter.numel()).sqrt() for parameter, total in zip(parameters, sums, strict=True)]
        self._adamw(parameters, group, [value.clamp(min=1.0) for value in rms])

    def _lion(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        beta1, beta2 = self._optim.betas
        for parameter in parameters:
            for weight, grad, state in self._pieces(parameter):
                moment = _moment(state, MOMENT)
                self._update(weight, moment.lerp(grad, 1 - beta1).sign(), group["lr"], group["weight_decay"])
                self._store(state, MOMENT, moment.lerp(grad, 1 - beta2))

    def _muon(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates = []
        for parameter in parameters:
            grad, state = _local(_grad(parameter)), self._local_state(parameter)
            momentum = _moment(state, MOMENTUM).lerp(grad, 1 - self._optim.momentum)
            updates.append(grad.lerp(momentum, self._optim.momentum))
            self._store(state, MOMENTUM, momentum)
        directions = orthogonal_updates(parameters, updates, _MATMUL_DTYPES[self._optim.muon_dtype])
        for parameter, direction in zip(parameters, directions, strict=True):
            step = direction * update_scale(parameter.shape)
            self._update(_local(parameter), step, group["lr"], group["weight_decay"])

    def _update(self, weight: Tensor, direction: Tensor, rate: float | Tensor, decay: float) -> None:
        """Decoupled weight decay, and a step in the direction."""
        self._replace(weight, weight * (1 - rate * decay) - rate * direction)


def _moment(state: dict[str, Tensor], name: str) -> Tensor:
    """A stored moment in fp32."""
    scales = state.get(name + SCALES)
    return state[name].float() if scales is None else decode_moment(state[name], scales)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _local(tensor: Tensor) -> Tensor:
    """The rows of this rank, in memory that the tensor shares."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Of the quintic iteration, by Keller Jordan (2024): singular values end between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_EPS = 1e-7


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with all of its singular values near 1, in its own type: five iterations of Newton-Schulz."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if is_tall else matrix
    x = x / torch.linalg.matrix_norm(x).clamp(min=_EPS)
    for _ in range(_NUM_ITERATIONS):
        gram: Tensor = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def update_scale(shape: Sequence[int]) -> float:
    """The factor with which updates of a matrix have the RMS of those of AdamW (Liu et al., 2025)."""
    return 0.2 * math.sqrt(max(shape))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Where the rows of a matrix are: in each replica, shard s holds `rows[s]` of them."""

    index: int
    shape: tuple[int, int]
    rows: tuple[int, ...]
    owner: int  # rank that computes

    def size(self, shard: int) -> int:
        """Elements of a shard."""
        return self.rows[shard] * self.shape[1]


def orthogonal_updates(
    parameters: Sequence[nn.Parameter], updates: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The local rows of `orthogonalize` of each matrix of which `updates` are the local rows. A collective.

    Args:
        parameters: matrices, sharded by rows on one mesh of replicas and shards.
        dtype: of the products of matrices.
    """
    if not parameters:
        return []
    first = parameters[0]
    assert isinstance(first, DTensor)
    grid, me = first.device_mesh.mesh, dist.get_rank()
    positions = {int(rank): (r, s) for r, row in enumerate(grid.tolist()) for s, rank in enumerate(row)}
    # With parallel.cpu_offload the updates are in host memory.
    num_shards, device = grid.shape[1], torch.device(first.device_mesh.device_type)
    matrices = _assign([(int(p.shape[0]), int(p.shape[1])) for p in parameters], list(positions), num_shards)
    ranks, (replica, shard) = sorted(positions), positions[me]

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else torch.empty(0, device=device)

    # An owner receives rows from the shards of its own replica.
    outgoing = {rank: [m for m in matrices if m.owner == rank] for rank in ranks if positions[rank][0] == replica}
    sent = [sum(m.size(shard) for m in outgoing.get(rank, [])) for rank in ranks]
    owned = [m for m in matrices if m.owner == me]
    received = [
        sum(m.size(positions[rank][1]) for m in owned) if positions[rank][0] == replica else 0 for rank in ranks
    ]
    flat = [updates[m.index].reshape(-1).float().to(device) for rank in ranks for m in outgoing.get(rank, [])]
    arrived = exchange_rows(joined(flat), sent, received).split(received)
    by_shard = {
        positions[rank][1]: part for rank, part in zip(ranks, arrived, strict=True) if positions[rank][0] == replica
    }
    results = _results(owned, by_shard, dtype)
    # The owner sends the rows of the result to all replicas.
    parts = [results[m.index][positions[rank][1]] for rank in ranks for m in owned]
    sent = [sum(m.size(positions[rank][1]) for m in owned) for rank in ranks]
    received = [sum(m.size(shard) for m in matrices if m.owner == rank) for rank in ranks]
    returned = exchange_rows(joined(parts), sent, received)
    local: dict[int, Tensor] = {}
    sizes = [(m.index, m.size(shard)) for rank in ranks for m in matrices if m.owner == rank]
    for (index, _), part in zip(sizes, returned.split([size for _, size in sizes]), strict=True):
        local[index] = part.view_as(updates[index]).to(updates[index].device)
    return [local[index] for index in range(len(parameters))]


def _assign(shapes: Sequence[tuple[int, int]], ranks: Sequence[int], num_shards: int) -> list[_Matrix]:
    """An owner for each matrix: the largest first, to the rank with the least work."""
    work, owners = dict.fromkeys(sorted(ranks), 0), {}
    for index in sorted(range(len(shapes)), key=lambda index: (-_cost(shapes[index]), index)):
        owners[index] = min(work, key=lambda rank: (work[rank], rank))
        work[owners[index]] += _cost(shapes[index])
    return [
        _Matrix(index, shape, tuple(_rows(shape[0], num_shards)), owners[index]) for index, shape in enumerate(shapes)
    ]


def _cost(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * min(shape)


def _rows(rows: int, num_shards: int) -> list[int]:
    """Rows of each shard: FSDP2 splits like `torch.chunk`."""
    part = -(-rows // num_shards)
    return [max(0, min(part, rows - part * shard)) for shard in range(num_shards)]


def _results(owned: Sequence[_Matrix], by_shard: dict[int, Tensor], dtype: torch.dtype) -> dict[int, list[Tensor]]:
    """The rows of each shard of the orthogonal matrices, flattened."""
    pieces = {
        shard: dict(zip([m.index for m in owned], part.split([m.size(shard) for m in owned]), strict=True))
        for shard, part in by_shard.items()
    }
    results = {}
    for matrix in owned:
        whole = torch.cat([pieces[shard][matrix.index] for shard in range(len(matrix.rows))]).view(matrix.shape)
        flat = orthogonalize(whole.to(dtype)).float().reshape(-1)
        results[matrix.index] = list(flat.split([matrix.size(shard) for shard in range(len(matrix.rows))]))
    return results
