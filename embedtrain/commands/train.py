"""`embedtrain train recipe=NAME`, or `python -m embedtrain`, also under torchrun: train a model, or run a pipeline."""

from embedtrain.config.compose import compose_recipes
from embedtrain.config.paths import require_recipe_paths
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.signals import StopSignals
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.types import Pipeline

__all__ = ["Recipe", "compose", "require_paths", "run"]


def compose(arguments: list[str]) -> list[Recipe] | Pipeline:
    """The recipes, or the pipeline, checked; a pipeline's paths exist, or its stages write them."""
    return compose_pipeline(arguments) or compose_recipes(arguments)


def require_paths(recipes: list[Recipe] | Pipeline) -> None:
    """Raise a ConfigError for a path of the first recipe that does not exist; an earlier training may write others."""
    if not isinstance(recipes, Pipeline):
        require_recipe_paths(recipes[0])


def run(recipes: list[Recipe] | Pipeline, signals: StopSignals) -> None:
    """Run a pipeline, or train one recipe after another, each in a process group of its own."""
    if isinstance(recipes, Pipeline):
        from embedtrain.pipeline.run import run_pipeline

        run_pipeline(recipes, signals)
        return
    from embedtrain.training.train import train, training_world

    for recipe in recipes:
        with training_world(recipe) as world:
            if world.watchdog is not None:
                signals.report = world.watchdog.end_after_signal
            train(recipe, world, signals)
