"""`python -m embedtrain prune model=DIR keep=6 output_dir=DIR`: a smaller model from some of a model's layers.

The weights of the other transformer blocks are left out, and the rest is renumbered.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain import __version__
from embedtrain.config.command_options import KindOptions, ModelOptions, PoolingOptions, WrittenModelOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.kinds import load_kind
from embedtrain.config.options import option
from embedtrain.config.paths import require_models
from embedtrain.config.recipe import ExportConfig
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import format_count

if TYPE_CHECKING:  # keeps `--help` free of torch
    from torch import Tensor

    from embedtrain.models.types import ModelSource

HELP = """embedtrain prune: a smaller model from some of a model's layers

  embedtrain prune model=DIR keep=6 output_dir=DIR [option=value ...]

The result is a model directory to train further, usually by distillation from
the whole model:
  embedtrain train recipe=NAME model.path=DIR loss=distill_embeddings ...

{options: model! output_dir! keep select layers dtype}"""


class LayerSelection(str, Enum):
    """Which layers `keep` keeps: evenly spaced ones with the first and the last, the first ones, or the last ones."""

    even = "even"
    first = "first"
    last = "last"


@dataclass(kw_only=True)
class PruneOptions(WrittenModelOptions, PoolingOptions, KindOptions, ModelOptions):
    """Options of `python -m embedtrain prune`."""

    keep: int | None = option(None, at_least=1, hint="leave it out with layers")  # number of layers to keep
    select: LayerSelection = LayerSelection.even
    layers: Any = None  # the layers to keep instead, counted from 0, such as [0,2,4,11]


def compose(arguments: list[str]) -> PruneOptions:
    """The options, checked."""
    options = compose_command("prune", PruneOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    if options.kind is not None:
        load_kind(options.kind, "kind")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the smaller model")
    if (options.keep is None) == (options.layers is None):
        raise ConfigError(
            f"keep={options.keep} and layers={options.layers}: write one of them, keep=6 or layers=[0,2,4]"
        )
    if options.layers is not None:
        layers = options.layers
        is_list = isinstance(layers, list) and all(type(layer) is int and layer >= 0 for layer in layers)
        check.require(
            is_list and bool(layers) and layers == sorted(set(layers)),
            "layers",
            "must be ascending numbers of layers from 0, such as [0,2,4]",
        )
        check.require(options.select is LayerSelection.even, "select", "has no effect with layers; leave it out")
    return options


def require_paths(options: PruneOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)


def run(options: PruneOptions) -> Path:
    """Write the model with the selected layers, which replaces `output_dir` once it has passed all checks.

    One process has one copy of the model in memory. Returns the directory.

    Raises ConfigError for layers that do not exist or cannot be kept, and CheckpointError if the directory does not
    reproduce the outputs of the kept layers.
    """
    from embedtrain.formats.export import DerivedModel, num_parameters, open_model, write_derived
    from embedtrain.formats.export_record import require_replaceable
    from embedtrain.formats.transformers import load_tokenizer
    from embedtrain.inference.loading.load import bound_tokenizer, quiet_libraries
    from embedtrain.models.build import full_state_dict
    from embedtrain.tracking.console import Console

    quiet_libraries()
    console = Console()
    source = open_model(
        options.model, options.revision, options.kind, options.pooling, trust_remote_code=options.trust_remote_code
    )
    assert source.directory is not None
    output_dir = require_replaceable(Path(options.output_dir), source.directory)
    prefix, num_layers = block_names(source)
    kinds = layer_kinds(source.config, num_layers)
    if options.layers is not None:
        kept = require_layers(options.layers, num_layers)
        require_kinds(kept, kinds, source.config.model_type)
    else:
        assert options.keep is not None
        kept = select_layers(options.keep, options.select, kinds)
    console.note(f"keeping {format_count(len(kept), 'layer')} of {num_layers}: {', '.join(map(str, kept))}")
    pruned = replace(source, config=pruned_config(source.config, kept, kinds))
    with console.phase("reading the model"):
        weights = keep_layers(full_state_dict(source, 0), prefix, kept)
        _require_weights(pruned, weights)
    tokenizer = bound_tokenizer(pruned, load_tokenizer(pruned))
    console.note(f"{num_parameters(pruned):,} of {num_parameters(source):,} parameters")
    what = (
        f"the layers {', '.join(map(str, kept))} of {{}}, kept by embedtrain {__version__}. Without further training "
        "its outputs are poor, unless these are first layers that were trained with `loss.matryoshka.layers`."
    )
    derived = DerivedModel(pruned, weights, tokenizer, options.model, what)
    settings = ExportConfig(dtype=options.dtype, check=options.check, truncate_dim=pruned.vectors.truncate_dim)
    written_model = write_derived(derived, output_dir, settings, console, trust_remote_code=options.trust_remote_code)
    return written_model.directory


def block_names(source: "ModelSource") -> tuple[str, int]:
    """The name of the list of blocks in the encoder's weights, and their number.

    Raises ConfigError if the blocks are not one list of as many layers as the configuration has.
    """
    from embedtrain.models.blocks import block_list, find_blocks
    from embedtrain.models.build import build_encoder

    encoder = build_encoder(source)
    num_layers = int(getattr(source.config, "num_hidden_layers", 0))
    prefix = block_list(encoder, num_layers)
    if prefix is None:
        raise ConfigError(
            f"model={source.directory}: its {len(find_blocks(encoder))} blocks are not the {num_layers} layers of its "
            f"configuration, as those of a {source.config.model_type} that shares layers: layers cannot be left out"
        )
    return prefix, num_layers


def layer_kinds(config: Any, num_layers: int) -> list[str]:
    """The kind of each layer, such as full_attention and sliding_attention; equal names if all are alike."""
    kinds = getattr(config, "layer_types", None)
    return [str(kind) for kind in kinds] if kinds else ["layer"] * num_layers


def require_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """The layers, or a ConfigError if one does not exist or all are kept."""
    if layers[-1] >= num_layers:
        raise ConfigError(
            f"layers={written(list(layers))}: the model has {num_layers} layers, the last is {num_layers - 1}"
        )
    if len(layers) == num_layers:
        raise ConfigError(f"layers={written(list(layers))}: these are all layers of the model; leave some out")
    return list(layers)


def require_kinds(kept: Sequence[int], kinds: Sequence[str], model_type: str) -> None:
    """A ConfigError unless layer i of the smaller model is of the kind that layer i of the model is.

    Other programs compute the kinds from the number of a layer, such as every third one with global attention.
    """
    for index, layer in enumerate(kept):
        if kinds[layer] != kinds[index]:
            raise ConfigError(
                f"layers={written(list(kept))}: layer {layer} of this {model_type} has {kinds[layer]} and would become "
                f"layer {index}, which has {kinds[index]}: keep the order of both kinds of layers, or write keep="
                f"{len(kept)}"
            )


def select_layers(keep: int, select: LayerSelection, kinds: Sequence[str]) -> list[int]:
    """`keep` layers, ascending, such that layer i of the smaller model is of the kind of layer i of the model.

    Raises ConfigError if there are not enough layers.
    """
    num_layers = len(kinds)
    if keep >= num_layers:
        raise ConfigError(f"keep={keep}: the model has {num_layers} layers; write a smaller number")
    match select:
        case LayerSelection.first:
            targets = list(range(keep))
        case LayerSelection.last:
            targets = list(range(num_layers - keep, num_layers))
        case LayerSelection.even:
            # The first and the last layer differ most from the others.
            targets = [round(index * (num_layers - 1) / max(1, keep - 1)) for index in range(keep)]
    kept: list[int] = []
    for index, target in enumerate(targets):
        # The nearest layer of the same kind that leaves enough layers for the rest.
        candidates = [
            layer
            for layer in range(kept[-1] + 1 if kept else 0, num_layers - (keep - 1 - index))
            if kinds[layer] == kinds[index]
        ]
        if not candidates:
            raise ConfigError(
                f"keep={keep}, select={select.value}: the kinds of layers ({', '.join(dict.fromkeys(kinds))}) cannot "
                "keep their order; write select=first, or layers"
            )
        kept.append(min(candidates, key=lambda layer: (abs(layer - target), layer)))
    return kept


def pruned_config(config: Any, kept: Sequence[int], kinds: Sequence[str]) -> Any:
    """The configuration of the smaller model."""
    pruned = copy.deepcopy(config)
    pruned.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        pruned.layer_types = [kinds[layer] for layer in kept]
    if getattr(config, "max_window_layers", None) is not None:  # of Qwen: an index of a layer
        pruned.max_window_layers = sum(layer < config.max_window_layers for layer in kept)
    return pruned


def keep_layers(weights: "Mapping[str, Tensor]", prefix: str, kept: Sequence[int]) -> "dict[str, Tensor]":
    """The weights of these layers with their new numbers, and all weights outside of layers."""
    number = {layer: index for index, layer in enumerate(kept)}
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)(\..*)")
    pruned: dict[str, Tensor] = {}
    for name, value in weights.items():
        match = pattern.fullmatch(name)
        if match is None:
            pruned[name] = value
        elif int(match[1]) in number:
            pruned[f"{prefix}.{number[int(match[1])]}{match[2]}"] = value
    return pruned


def _require_weights(pruned: "ModelSource", weights: "Mapping[str, Tensor]") -> None:
    from embedtrain.models.build import build_encoder

    expected = build_encoder(pruned).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = [name for name, tensor in expected.items() if shapes.get(name) != tuple(tensor.shape)]
    wrong += [name for name in shapes if name not in expected]
    if wrong:
        raise ConfigError(
            f"model={pruned.directory}: a {pruned.config.model_type} of these layers has other weights, such as "
            f"{wrong[0]}: its first layer differs from the others; keep layer 0"
        )
