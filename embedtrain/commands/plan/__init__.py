"""`python -m embedtrain plan recipe=NAME gpus=64 gpu_memory=80`: memory, strategy and time, before a GPU is booked.

The exit code is 0 if it fits in memory, and 1 if it does not.
"""

from embedtrain.commands.plan.options import PlanOptions, compose_pipeline_plan, compose_plan
from embedtrain.config.accelerate import describe_accelerate_config
from embedtrain.config.recipe import Recipe
from embedtrain.pipeline.types import Pipeline

__all__ = ["PlanOptions", "compose", "run"]


def compose(arguments: list[str]) -> tuple[Recipe | Pipeline, PlanOptions]:
    """What to plan, a training or a pipeline, and the options, checked."""
    return compose_pipeline_plan(arguments) or compose_plan(arguments)


def run(options: tuple[Recipe | Pipeline, PlanOptions]) -> None:
    """Print the plan of a training, search or pipeline; with `json`, nothing else is written to standard output."""
    import json

    from embedtrain.commands.plan.compute import plan
    from embedtrain.commands.plan.pipeline import plan_pipeline, print_pipeline_plan
    from embedtrain.commands.plan.printing import print_plan
    from embedtrain.commands.plan.search import plan_search, print_search_plan
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.pages import Page

    recipe, plan_options = options
    quiet_libraries()
    if isinstance(recipe, Pipeline):
        stages = plan_pipeline(recipe, plan_options)
        if plan_options.json:
            print(json.dumps({"pipeline": recipe.name, "stages": [stage.as_json() for stage in stages]}, indent=2))
        else:
            print_pipeline_plan(Page(), recipe, stages)
        if not all(stage.training is None or stage.training.best.fits for stage in stages):
            raise SystemExit(1)
        return
    if plan_options.documents is not None:
        search = plan_search(recipe, plan_options)
        if plan_options.json:
            print(json.dumps(search.as_json(), indent=2))
        else:
            print_search_plan(Page(), search)
        if not search.fits:
            raise SystemExit(1)
        return
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
