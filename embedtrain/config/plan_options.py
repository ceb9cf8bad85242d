"""The command line of plan: its own options, and those of the training that is planned."""

from dataclasses import fields, replace

from embedtrain.config.accelerate import with_accelerate
from embedtrain.config.checks import check_recipe
from embedtrain.config.compose import compose_one, to_dataclass, to_recipe
from embedtrain.config.door_options import PlanOptions
from embedtrain.config.folders import folder
from embedtrain.config.plan_checks import check_plan
from embedtrain.config.schema import DataConfig, Recipe, TrainSource

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
    options = to_dataclass(compose_one("plan", folder("configs") / "doors", own), PlanOptions)
    recipe = with_accelerate(to_recipe(compose_one("config", folder("configs"), of_training)))
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
