"""Options of `python -m embedtrain prune`."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from embedtrain.config.command_options import KindOptions, ModelOptions, PoolingOptions, WrittenModelOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.kinds import load_kind
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError

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
class PruneOptions(ModelOptions, KindOptions, PoolingOptions, WrittenModelOptions):
    """Options of `python -m embedtrain prune`."""

    keep: int | None = None  # number of layers to keep
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
    check.at_least(1, "keep", "leave it out with layers")
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
