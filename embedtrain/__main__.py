"""`python -m embedtrain recipe=NAME`: train. Under torchrun the same, on all ranks."""

from embedtrain.door import alike_on_all_ranks, enter


def main() -> None:
    """The console command `embedtrain`."""
    enter(story)


def story(arguments: list[str]) -> None:
    """Compose the recipe, join the ranks, train."""
    from embedtrain.config.compose import compose_recipes

    with alike_on_all_ranks():
        recipes = compose_recipes(arguments)

    # Only now is torch imported: --help and a mistyped option answer at once.
    from embedtrain.distributed.world import joined_world
    from embedtrain.train import train

    for recipe in recipes:
        with joined_world(recipe.parallel.timeout) as world:
            train(recipe, world)


if __name__ == "__main__":
    main()
