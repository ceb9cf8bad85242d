"""Builds an encoder without memory for its weights, and locates each weight in the model's files.

What a kind of model adds to the backbone is built, read and located by the kind itself.
"""

import copy
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.encoder import Encoder, TowerEncoder, prepare_backbone
from embedtrain.models.heads import initial_head_weights, module_locations, whole_head_names, whole_head_weights
from embedtrain.models.own_class import HEAD
from embedtrain.models.stored_weights import TensorLocation, shapes_match, stored_tensors
from embedtrain.models.types import ModelSource
from embedtrain.utils.formatting import one_line

_MAX_PARAMETERS_PER_BYTE = 8  # one bit each
_MAX_TENSOR = 1 << 26  # numbers of a stored tensor that a small model may leave unused
# hidden_dropout_prob, attention_dropout, attn_pdrop, dropout_rate; not layerdrop nor drop_path_rate, which leave out
# layers.
_DROPOUT = re.compile(r"(^|_)p?drop(out)?(_prob|_rate)?$")


def build_encoder(source: ModelSource, dropout: float | None = None) -> Encoder:
    """The encoder with parameters on the meta device and buffers in memory, ready to be sharded.

    With `dropout`, that is the probability of every dropout that the configuration names, which itself stays as it is.
    A ConfigError if the architecture has none.

    Buffers are real because many are in no checkpoint (position ids, rotary frequencies): after `to_empty` they would
    contain garbage.
    """
    with init_empty_weights(include_buffers=False):
        return assemble_encoder(source, dropout)


def assemble_encoder(source: ModelSource, dropout: float | None = None) -> Encoder:
    """The encoder in memory with random weights, or on the meta device within torch's or accelerate's contexts."""
    if source.towers:
        return TowerEncoder({name: assemble_encoder(tower, dropout) for name, tower in source.towers.items()})
    try:
        config = source.config if dropout is None else _with_dropout(source.config, dropout)
        model = source.kind.model_class(config).from_config(
            config, dtype=torch.float32, trust_remote_code=source.trust_remote_code
        )
        if dropout and not has_dropout(model):
            raise ConfigError(
                f"model.dropout={dropout:g}: the architecture {source.config.model_type} has no dropout; leave it out"
            )
        return source.kind.encoder(source, model)
    except (ModelError, ConfigError):
        raise
    except Exception as error:  # torch and transformers raise nearly anything for invalid sizes
        raise ModelError(
            f"cannot build a model from this {source.config.model_type} configuration "
            f"({type(error).__name__}: {one_line(error)})"
        ) from None


def _with_dropout(config: PretrainedConfig, dropout: float) -> PretrainedConfig:
    """A copy with this probability for every dropout that it names, also in the configurations inside it."""
    config = copy.deepcopy(config)
    pending = [config]
    while pending:
        values = vars(part := pending.pop())
        pending += [value for value in values.values() if isinstance(value, PretrainedConfig)]
        for name in [*values]:
            # None is that of another entry, as of `classifier_dropout`.
            if _DROPOUT.search(name) and isinstance(values[name], int | float) and not isinstance(values[name], bool):
                setattr(part, name, dropout)
    return config


def has_dropout(model: nn.Module) -> bool:
    """Whether a module has dropout in training."""
    for module in model.modules():
        # Attention has no module for it where a kernel draws the masks.
        numbers = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        if (isinstance(module, nn.Dropout) and module.p) or any(numbers):
            return True
    return False


def full_state_dict(source: ModelSource, seed: int) -> dict[str, Tensor]:
    """All weights of the encoder, unsharded and in memory, with the keys of `build_encoder`.

    Without a directory they are random, a function of `seed`; else transformers reads them, in any format it supports,
    and weights that it cannot read or find raise a ModelError. For one rank, which distributes them to the others.
    """
    if source.towers:
        states = {prefix: full_state_dict(tower, seed) for prefix, tower in source.parts.items()}
        return {prefix + name: weight for prefix, state in states.items() for name, weight in state.items()}
    if source.directory is not None:
        _require_plausible_size(source, dict.fromkeys([source.directory, *source.module_folders.values()]))
    torch.manual_seed(seed)
    encoder = assemble_encoder(source)
    for name, weight in initial_head_weights(source.vectors.dense, seed).items():
        encoder.get_parameter(name).data.copy_(weight)
    if source.directory is None:
        return dict(encoder.state_dict())
    weights, missing = source.kind.read_weights(source)
    if absent := sorted(missing & encoder.state_dict().keys()):
        hint = source.kind.missing_weights_hint(absent)
        raise ModelError(
            f"{source.directory} lacks {len(absent)} of {len(weights)} weights, such as "
            f"{absent[0].removeprefix('backbone.').removeprefix(HEAD)}: they would be random{hint}"
        )
    encoder.load_state_dict({name: weight for name, weight in weights.items() if name not in missing}, strict=False)
    state = encoder.state_dict()
    for name, location in module_locations(source).items():  # new ones keep their initial weights
        with safe_open(location.path, framework="pt") as file:
            state[name].copy_(file.get_tensor(location.key))
    for name, weight in whole_head_weights(source.vectors.dense).items():
        encoder.get_parameter(name).data.copy_(weight)
    return dict(encoder.state_dict())


def read_model(source: ModelSource, model_class: Any, config: PretrainedConfig | None) -> tuple[Any, set[str]]:
    """A model of transformers with the weights of a source's files, and the names of those that the files lack.

    Raises ModelError for files that cannot be read.
    """
    options: dict[str, Any] = {} if config is None else {"config": config}
    try:
        model, report = model_class.from_pretrained(
            source.directory,
            dtype=torch.float32,
            trust_remote_code=source.trust_remote_code,
            weights_only=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = one_line(error)
        if type(error).__name__ == "UnpicklingError":  # torch's message explains how to execute its content
            reason = "they are a pickle with more than tensors; ask the authors for safetensors"
        raise ModelError(f"cannot read weights from {source.directory}: {reason}") from None
    return model, set(report["missing_keys"])


def read_backbone(source: ModelSource) -> tuple[dict[str, Tensor], set[str]]:
    """The weights of a backbone without a head, by the encoder's names, and the names of those that the files lack."""
    model, missing = read_model(source, source.kind.model_class(source.config), source.config)
    weights = {f"backbone.{name}": weight for name, weight in prepare_backbone(model).state_dict().items()}
    return weights, {f"backbone.{name}" for name in missing}


def head_weights(source: ModelSource) -> dict[str, Tensor]:
    """The weights of heads that are not in safetensors files under their names, by the encoder's names."""
    if source.towers:
        states = {prefix: head_weights(tower) for prefix, tower in source.parts.items()}
        return {prefix + name: weight for prefix, state in states.items() for name, weight in state.items()}
    return source.kind.head_weights(source) | whole_head_weights(source.vectors.dense)


def _require_plausible_size(source: ModelSource, directories: Iterable[Path]) -> None:
    """Reject a configuration far larger than the stored weights before allocating memory."""
    directory, *others = directories
    files = [path for folder in (directory, *others) for path in folder.iterdir()]
    stored = sum(path.stat().st_size for path in files if path.suffix in (".safetensors", ".bin"))
    needed = sum(parameter.numel() for parameter in build_encoder(source).parameters())
    if stored and needed > _MAX_PARAMETERS_PER_BYTE * stored:
        raise ModelError(
            f"{directory / 'config.json'} describes {needed:,} parameters, but the weights have only {stored:,} bytes: "
            "they belong to another model"
        )
    # transformers reads a tensor before it compares the shapes.
    for location in (location for folder in (directory, *others) for location in stored_tensors(folder).values()):
        with safe_open(location.path, framework="pt") as file:
            numbers = math.prod(file.get_slice(location.key).get_shape())
        if numbers > max(needed, _MAX_TENSOR):
            raise ModelError(
                f"{location.path}: {location.key} has {numbers:,} numbers, and the whole model that config.json "
                f"describes {needed:,} parameters: it belongs to another model"
            )


def locate_weights(source: ModelSource, shapes: Mapping[str, torch.Size]) -> dict[str, TensorLocation] | None:
    """The location of each of the encoder's tensors, or None if they cannot be read one by one.

    They can if the directory has safetensors files with the model's own keys, possibly with its prefix (`roberta.`,
    `bert.`, `model.`), and equal shapes. Old names and pickles are left to `full_state_dict`. What `head_weights` reads
    has no location.
    """
    if source.towers:
        found: dict[str, TensorLocation] = {}
        for prefix, tower in source.parts.items():
            own = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
            if (of_tower := locate_weights(tower, own)) is None:
                return None
            found |= {prefix + name: location for name, location in of_tower.items()}
        return found
    if source.directory is None:
        return None
    stored = stored_tensors(source.directory)
    locations = module_locations(source)
    names = [name.removeprefix("backbone.") for name in shapes if name.startswith("backbone.")]
    prefixes = {key.removesuffix(names[0]) for key in stored if key.endswith(names[0])} if names else set[str]()
    for prefix in sorted(prefixes, key=len):
        if all(prefix + name in stored for name in names):
            locations |= {"backbone." + name: stored[prefix + name] for name in names}
            break
    of_head, computed = source.kind.locate_head(source, shapes, stored)
    locations |= of_head
    computed = computed | whole_head_names(source.vectors.dense, shapes)
    if set(locations) != set(shapes) - computed or not shapes_match(locations, shapes):
        return None
    return locations
