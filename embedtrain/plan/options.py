"""Options of `python -m embedtrain.plan` that cannot work."""

import math
from dataclasses import dataclass, fields, replace

from embedtrain.config.accelerate import apply_accelerate_config
from embedtrain.config.checks import check_recipe
from embedtrain.config.compose import compose_command, compose_training, to_recipe
from embedtrain.config.recipe import DataConfig, Recipe, TrainSource
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class PlanOptions:
    """Options of `python -m embedtrain.plan`; all others on its command line are the recipe's."""

    gpus: int = 8  # in all
    gpus_per_node: int = 8  # GPUs that share a machine
    gpu_memory: float = 80.0  # GiB of each; a tenth of it is left to the driver and to what the plan does not know
    bandwidth_node: float = 300.0  # GB/s that a GPU sends within its node (H100: NVLink)
    bandwidth_network: float = 50.0  # GB/s that a GPU sends to other nodes (an adapter of 400 Gb/s each)
    tflops: float = 400.0  # that a GPU reaches in training; 400 is what good trainers publish of an H100 in bf16
    tokens_per_text: int | None = None  # in the mean, padding included; default: the model's length, all of it
    texts_per_row: int = 2  # a query and its positive; one more for each hard negative that is used
    json: bool = False  # one JSON object instead of tables; `--json` is the same


def check_plan(options: PlanOptions) -> PlanOptions:
    """The options themselves, if they can work.

    Raises:
        ConfigError: a number out of range, or nodes that are not full.
    """
    for name in ("gpus", "gpus_per_node", "texts_per_row", "tokens_per_text"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: at least 1")
    for name in ("gpu_memory", "bandwidth_node", "bandwidth_network", "tflops"):
        value = getattr(options, name)
        if not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name}={value}: must be above 0")
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        full = options.gpus // options.gpus_per_node * options.gpus_per_node
        raise ConfigError(
            f"gpus={options.gpus} with gpus_per_node={options.gpus_per_node}: nodes have as many each; "
            f"write gpus={full} or gpus={full + options.gpus_per_node}"
        )
    return options


_OWN = [field.name for field in fields(PlanOptions)]
_ASKS_FOR_HELP = ("--help", "-h")


def compose_plan(arguments: list[str]) -> tuple[Recipe, PlanOptions]:
    """The recipe and the machines that it is planned for.

    What is no option of `PlanOptions` is one of the recipe. A recipe without data, steps or name can be planned.

    Raises:
        ConfigError: as `compose_recipes`, or a number out of range.
        SystemExit: after `--help` and its like.
    """
    arguments = ["json=true" if argument == "--json" else argument for argument in arguments]
    own = [argument for argument in arguments if _is_own(argument)]
    of_training = [argument for argument in arguments if not _is_own(argument)]
    options = compose_command("plan", PlanOptions, own)
    recipe = apply_accelerate_config(to_recipe(compose_training(of_training)))
    if not any(argument.lstrip("+").startswith("recipe=") for argument in of_training):
        recipe.name = recipe.name or "plan"
    if recipe.train.steps is None and recipe.train.epochs is None:
        recipe.train.epochs = 1.0
    check_recipe(recipe if recipe.data.train else replace(recipe, data=_any_data(recipe.data)))
    return recipe, check_plan(options)


def _is_own(argument: str) -> bool:
    return argument.lstrip("+~").partition("=")[0] in _OWN or argument in _ASKS_FOR_HELP


def _any_data(data: DataConfig) -> DataConfig:
    return replace(data, train=[TrainSource(path="none")])
