"""`embedtrain train recipe=NAME`, or `python -m embedtrain`, also under torchrun: train a model, or run a pipeline."""

import sys
from functools import partial

from embedtrain.cli.entry import run_command, run_module
from embedtrain.config.commands import COMMANDS
from embedtrain.config.compose import compose_recipes
from embedtrain.config.paths import require_recipe_paths
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.signals import StopSignals
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.types import Pipeline


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
                signals.report = world.watchdog.report_signal
            train(recipe, world, signals)


def compose(arguments: list[str]) -> list[Recipe] | Pipeline:
    """The recipes, checked; the paths of the first exist, and those of others may be written by earlier trainings."""
    pipeline = compose_pipeline(arguments)
    if pipeline is not None:
        return pipeline
    recipes = compose_recipes(arguments)
    require_recipe_paths(recipes[0])
    return recipes


def main() -> None:
    """The command that the first argument names, or the one that trains."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        run_module(COMMANDS[sys.argv.pop(1)].module)
        return
    signals = StopSignals()

    def compose_listening(arguments: list[str]) -> list[Recipe] | Pipeline:
        signals.listen()
        return compose(arguments)

    # Its results are files: a scheduler would repeat a finished training whose log did not fit on the disk.
    main_with_signals = partial(run, signals=signals)
    run_command(compose_listening, main_with_signals, needs_output=False, launches="train")


if __name__ == "__main__":
    main()
