"""`python -m embedtrain plan recipe=NAME gpus=64 gpu_memory=80`: memory, strategy and time, before a GPU is booked.

The exit code is 0 if it fits in memory, and 1 if it does not.
"""

from dataclasses import dataclass, fields, replace

from embedtrain.config.accelerate import apply_accelerate_config, describe_accelerate_config
from embedtrain.config.arguments import option_of
from embedtrain.config.checks import check_recipe
from embedtrain.config.command_line import asks_for_help, parse_command_line
from embedtrain.config.command_options import IndexOptions, JsonOptions
from embedtrain.config.compose import compose_command, compose_recipe
from embedtrain.config.evaluation import IndexConfig, check_index
from embedtrain.config.names import suggest
from embedtrain.config.parsing import GROUPS
from embedtrain.config.recipe import Recipe, TrainSource
from embedtrain.config.validation import OptionChecks, require_single_process, unknown_option
from embedtrain.errors import ConfigError
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.types import Pipeline

HELP = """embedtrain plan: memory, strategy and time of a training, before a GPU is booked

  embedtrain plan recipe=NAME gpus=64 gpu_memory=80 [training option ...]
  embedtrain plan recipe=pipelines/NAME gpus=64      all stages of a pipeline
  embedtrain plan model.path=DIR documents=10000000  an evaluation, or mining

No GPU, data or weights are needed: only a model's configuration is downloaded.
The exit code is 0 if the training fits in memory, and 1 if it does not.

{options: gpus gpus_per_node gpu_memory bandwidth_node bandwidth_network tflops tokens_per_text
  texts_per_row documents queries top_k tokens_per_query index.dtype index.scan_dtype index.place
  search_tflops tokens_per_second json}

`embedtrain train --help` explains the options of training and lists recipes."""


@dataclass(kw_only=True)
class PlanOptions(IndexOptions, JsonOptions):
    """Options of `python -m embedtrain plan`; further options on its command line are the recipe's."""

    gpus: int = 8  # total number of GPUs
    gpus_per_node: int = 8  # GPUs per machine
    gpu_memory: float = 80.0  # GiB per GPU, of which a tenth is left for the driver and for what the plan omits
    bandwidth_node: float = 300.0  # GB/s that a GPU sends within its node (H100: NVLink)
    bandwidth_network: float = 50.0  # GB/s that a GPU sends to other nodes (an adapter of 400 Gb/s each)
    tflops: float = 400.0  # per GPU in training; 400 is published for good trainers on an H100 in bf16
    tokens_per_text: int | None = None  # mean, including padding; default: the maximum length
    # A query, its positive, and its hard negatives; default: those of the first rows, if the files are here, or of the
    # stage that mines them; else the negatives that data.train asks for.
    texts_per_row: int | None = None
    documents: int | None = None  # plan an evaluation or mining of so many documents instead of a training
    queries: int = 10000  # of an evaluation, or rows of mining
    top_k: int = 100  # documents of each query: as many as the metrics need, or rank_max of mining
    tokens_per_query: int | None = None  # mean, including padding; default: tokens_per_text
    # Per GPU in products of queries and documents in fp32, with the choice of the best; an H100 has at most 67.
    search_tflops: float = 40.0
    tokens_per_second: float = 1e6  # that the CPU cores of a rank tokenize


_NAMES = [option.name for option in fields(PlanOptions)]
_COUNTS_OF_SEARCH = ("documents", "queries", "top_k", "tokens_per_query")


def compose_plan(arguments: list[str]) -> tuple[Recipe, PlanOptions]:
    """The recipe to plan and the options, checked. A recipe without data, steps or name can be planned."""
    require_single_process("plan")
    command, training = _split(arguments)
    for argument in training:
        _check_name(argument, _NAMES)
    options = _compose_options(command)
    recipe = apply_accelerate_config(compose_recipe(training))
    if not any(option_of(argument) == "recipe" for argument in training):
        recipe.name = recipe.name or "plan"
    data = recipe.data if recipe.data.train else replace(recipe.data, train=[TrainSource(path="none")])
    check_recipe(replace(recipe, data=data))
    return recipe, options


def compose_pipeline_plan(arguments: list[str]) -> tuple[Pipeline, PlanOptions] | None:
    """The pipeline to plan and the options, checked; None for one training. Its files need not be here."""
    command, training = _split(arguments)
    pipeline = compose_pipeline(training, check_paths=False)
    if pipeline is None:
        return None
    options = _compose_options(command)
    message = "is for one model; write model.path=DIR instead of a pipeline, or leave it out"
    OptionChecks(options).require(options.documents is None, "documents", message)
    return pipeline, options


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of the plan, and those of what is planned."""
    arguments = ["json=true" if argument == "--json" else argument for argument in arguments]
    if any(argument.startswith("--") and _name_of_flag(argument) in _NAMES for argument in arguments):
        parse_command_line(arguments, PlanOptions, multirun=False)  # raises the message for `--gpus 8`
    command = [
        argument for argument in arguments if option_of(argument).partition(".")[0] in _NAMES or asks_for_help(argument)
    ]
    return command, [argument for argument in arguments if argument not in command]


def _compose_options(command: list[str]) -> PlanOptions:
    options = compose_command("plan", PlanOptions, command, HELP)
    check = OptionChecks(options)
    for name in ("gpus", "gpus_per_node", "texts_per_row", "tokens_per_text", *_COUNTS_OF_SEARCH):
        check.at_least(1, name)
    for name in ("gpu_memory", "bandwidth_node", "bandwidth_network", "tflops", "search_tflops", "tokens_per_second"):
        check.positive(name)
    check_index(options.index, "index.", stores_vectors=True)
    if options.documents is None:
        message = "has no effect without documents; write documents=N to plan a search"
        for name in ("queries", "top_k", "tokens_per_query", "search_tflops", "tokens_per_second"):
            check.require(getattr(options, name) == getattr(PlanOptions, name), name, message)
        of_index = OptionChecks(options.index, "index.")
        for option in fields(IndexConfig):
            of_index.require(getattr(options.index, option.name) == option.default, option.name, message)
    per_node = options.gpus_per_node
    full = options.gpus // per_node * per_node
    check.require(
        options.gpus <= per_node or options.gpus == full,
        "gpus",
        f"must be a multiple of gpus_per_node={per_node}; write gpus={full} or gpus={full + per_node}",
    )
    return options


def _name_of_flag(argument: str) -> str:
    return argument[2:].partition("=")[0].replace("-", "_")


def _check_name(argument: str, names: list[str]) -> None:
    """Raise for a name that neither the plan nor a recipe has: the recipe's own message knows only its options."""
    option, equals, value = argument.partition("=")
    allowed = [*names, *(option.name for option in fields(Recipe))]
    if not equals or not option.isidentifier() or option in allowed or option in GROUPS:
        return
    suggestion = suggest(option, PlanOptions, value) or suggest(option, Recipe, value)
    raise ConfigError(f"unknown option {argument}: {suggestion}" if suggestion else unknown_option(option, allowed))


def compose(arguments: list[str]) -> tuple[Recipe | Pipeline, PlanOptions]:
    """What to plan, a training or a pipeline, and the options, checked."""
    return compose_pipeline_plan(arguments) or compose_plan(arguments)


def run(options: tuple[Recipe | Pipeline, PlanOptions]) -> None:
    """Print the plan of a training, search or pipeline; with `json`, nothing else is written to standard output."""
    import json

    from embedtrain.commands.plan.compute import plan, plan_search, print_search_plan
    from embedtrain.commands.plan.printing import plan_pipeline, print_pipeline_plan, print_plan
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
