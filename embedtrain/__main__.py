"""`python -m embedtrain recipe=NAME`: train. Under torchrun the same, on all ranks."""

from functools import partial

from embedtrain.cli import run_command
from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.signals import StopSignals


def act(recipes: list[Recipe], stopping: StopSignals) -> None:
    """Join the ranks and train; recipe after recipe with Hydra's multirun."""
    from embedtrain.distributed.world import joined_world
    from embedtrain.training.train import train

    for recipe in recipes:
        with joined_world(recipe.parallel.timeout) as world:
            if world.watchdog is not None:
                stopping.report = world.watchdog.report_signal
            train(recipe, world, stopping)


def main() -> None:
    """The console command `embedtrain`."""
    stopping = StopSignals()
    stopping.listen()
    run_command(compose_recipes, partial(act, stopping=stopping))


if __name__ == "__main__":
    main()
