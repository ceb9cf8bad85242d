"""Losses and the evaluation function that whoever started the run has named."""

from collections.abc import Sequence

from embedtrain.config.code import code_paths
from embedtrain.config.recipe import Recipe
from embedtrain.evaluation.compressed import Row
from embedtrain.evaluation.function import EvaluationFunction, check_function_name, function_name, load_function
from embedtrain.evaluation.metrics import parse_best_metric
from embedtrain.evaluation.set_kinds import metric_names
from embedtrain.evaluation.types import LoadedSet
from embedtrain.losses.custom import load_loss_class


def import_code(recipe: Recipe) -> EvaluationFunction | None:
    """Import the losses that the recipe names, to find mistakes early, and return its evaluation function."""
    function: EvaluationFunction | None = None
    for option, path in code_paths(recipe):
        if option == "evaluation.function":
            function = load_function(path, option)
        else:
            load_loss_class(path, option)
    return function


def parse_recipe_metric(
    recipe: Recipe, sets: Sequence[LoadedSet], function: EvaluationFunction | None, rows: Sequence[Row]
) -> tuple[str, str] | None:
    """Set and metric of `checkpoint.best_metric`. The metrics of a function are known when it has been called."""
    best, name = recipe.checkpoint.best_metric, None if function is None else function_name(function)
    metrics = metric_names(sets, rows)
    if function is not None:
        check_function_name(function, metrics, "evaluation.function")
    if best is None:
        return None
    if name is not None and best.rpartition("/")[0] == name:
        return name, best.rpartition("/")[2]
    return parse_best_metric(best, metrics)
