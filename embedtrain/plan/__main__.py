"""`python -m embedtrain.plan recipe=NAME gpus=64 gpu_memory=80`: memory, strategy and time, before a GPU is booked.

The exit code is 0 where the training fits, and 1 where it does not.
"""

from embedtrain.cli import run_command
from embedtrain.config.accelerate import describe_accelerate_config
from embedtrain.config.recipe import Recipe
from embedtrain.plan.options import PlanOptions, compose_plan


def act(asked: tuple[Recipe, PlanOptions]) -> None:
    """Look at the model's configuration, choose, and tell; as JSON nothing else is on standard output."""
    import json

    from embedtrain.loading.load import quiet_libraries
    from embedtrain.plan.compute import plan
    from embedtrain.plan.printing import print_plan
    from embedtrain.tracking.pages import Page

    recipe, options = asked
    quiet_libraries()
    planned = plan(recipe, options)
    if options.json:
        print(json.dumps(planned.as_json(), indent=2))
    else:
        page = Page()
        print_plan(page, planned)
        for line in describe_accelerate_config(recipe):
            page.note(line, "dim")
    if not planned.best.fits:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(compose_plan, act)
