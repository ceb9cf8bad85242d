"""Parameter groups: which learning rate, weight decay and freezing each trained parameter has."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from embedtrain.config.optim import OptimConfig, OptimizerName, ParameterGroup
from embedtrain.errors import ConfigError
from embedtrain.models.blocks import find_blocks
from embedtrain.models.static_queries import QUERY_WEIGHTS, QUERY_WEIGHTS_LR
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
        if id(parameter) in of_blocks and parameter.dim() == 2 and not re.search("embed|lora_", name)
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
