"""`python -m embedtrain recipe=NAME`: train. Under torchrun the same, on all ranks."""

from embedtrain.config.compose import compose_recipes
from embedtrain.config.schema import Recipe
from embedtrain.door import enter


def act(recipes: list[Recipe]) -> None:
    """Join the ranks and train; recipe after recipe with Hydra's multirun."""
    from embedtrain.distributed.world import joined_world
    from embedtrain.train import train

    for recipe in recipes:
        with joined_world(recipe.parallel.timeout) as world:
            train(recipe, world)


def main() -> None:
    """The console command `embedtrain`."""
    enter(compose_recipes, act)


if __name__ == "__main__":
    main()
