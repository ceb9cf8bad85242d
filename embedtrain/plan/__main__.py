"""`python -m embedtrain.plan recipe=NAME gpus=64 gpu_memory=80`: memory, strategy and time, before a GPU is booked.

The exit code is 0 if the training fits in memory, and 1 if it does not.
"""

from embedtrain.cli import run_command
from embedtrain.config.accelerate import describe_accelerate_config
from embedtrain.config.recipe import Recipe
from embedtrain.plan.options import PlanOptions, compose_plan


def main(options: tuple[Recipe, PlanOptions]) -> None:
    """Plan a training and print the plan; with `json`, nothing else is written to standard output."""
    import json

    from embedtrain.loading.load import quiet_libraries
    from embedtrain.plan.compute import plan
    from embedtrain.plan.printing import print_plan
    from embedtrain.tracking.pages import Page

    recipe, plan_options = options
    quiet_libraries()
    result = plan(recipe, plan_options)
    if plan_options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        page = Page()
        print_plan(page, result)
        for line in describe_accelerate_config(recipe):
            page.note(line, "dim")
    if not result.best.fits:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(compose_plan, main)
