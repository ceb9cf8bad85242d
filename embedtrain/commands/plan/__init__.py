"""`python -m embedtrain plan recipe=NAME gpus=64 gpu_memory=80`: memory, strategy and time, before a GPU is booked.

The exit code is 0 if it fits in memory, and 1 if it does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from embedtrain.config.accelerate import apply_accelerate_config, describe_accelerate_config
from embedtrain.config.checks import check_recipe
from embedtrain.config.command_line import asks_for_help, option_of, parse_command_line
from embedtrain.config.command_options import IndexOptions, JsonOptions
from embedtrain.config.compose import compose_command, compose_recipe
from embedtrain.config.evaluation import IndexConfig, check_index
from embedtrain.config.hydra_files import GROUPS
from embedtrain.config.names import suggest
from embedtrain.config.options import option
from embedtrain.config.recipe import Recipe, TrainSource
from embedtrain.config.validation import OptionChecks, require_single_process, unknown_option
from embedtrain.errors import ConfigError
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.types import Pipeline, Stage
from embedtrain.utils.formatting import format_bytes

if TYPE_CHECKING:  # keeps `--help` free of torch
    from collections.abc import Callable

    from embedtrain.commands.plan.compute import TrainingPlan, VocabularyHead
    from embedtrain.planning.strategy import LayoutCandidate
    from embedtrain.tracking.pages import Page


HELP = """embedtrain plan: memory, strategy and time of a training, before a GPU is booked

  embedtrain plan recipe=NAME gpus=64 gpu_memory=80 [training option ...]
  embedtrain plan recipe=pipelines/NAME gpus=64      all stages of a pipeline
  embedtrain plan model.path=DIR documents=10000000  an evaluation, or mining

No GPU, data or weights are needed: only a model's configuration is downloaded.
The exit code is 0 if the training fits in memory, and 1 if it does not.

{options: gpus gpus_per_node gpu_memory host_memory bandwidth_node bandwidth_network tflops tokens_per_text
  texts_per_row documents queries search_depth tokens_per_query index.dtype index.scan_dtype index.place
  index.token_pooling index.first_stage index.first_stage_pooling search_tflops tokens_per_second json}

`embedtrain train --help` explains the options of training and lists recipes."""


@dataclass(kw_only=True)
class PlanOptions(JsonOptions, IndexOptions):
    """Options of `python -m embedtrain plan`; further options on its command line are the recipe's."""

    gpus: int = option(8, at_least=1)  # total number of GPUs
    gpus_per_node: int = option(8, at_least=1)  # GPUs per machine
    # GiB per GPU, of which a tenth is left for the driver and for what the plan omits
    gpu_memory: float = option(80.0, above=0)
    host_memory: float | None = option(None, above=0, hint="null sets no limit")  # GiB per machine; null: not limited
    bandwidth_node: float = option(300.0, above=0)  # GB/s that a GPU sends within its node (H100: NVLink)
    # GB/s that a GPU sends to other nodes (an adapter of 400 Gb/s each)
    bandwidth_network: float = option(50.0, above=0)
    # per GPU in training; 400 is published for good trainers on an H100 in bf16
    tflops: float = option(400.0, above=0)
    tokens_per_text: int | None = option(None, at_least=1)  # mean, including padding; default: the maximum length
    # A query, its positive, and its hard negatives; default: those of the first rows, if the files are here, or of the
    # stage that mines them; else the negatives that data.train asks for.
    texts_per_row: int | None = option(None, at_least=1)
    # plan an evaluation or mining of so many documents instead of a training
    documents: int | None = option(None, at_least=1)
    queries: int = option(10000, at_least=1)  # of an evaluation, or rows of mining
    # documents of each query: as many as the metrics need, or rank_max of mining
    search_depth: int = option(100, at_least=1)
    tokens_per_query: int | None = option(None, at_least=1)  # mean, including padding; default: tokens_per_text
    # Per GPU in products of queries and documents in fp32, with the choice of the best; an H100 has at most 67.
    search_tflops: float = option(40.0, above=0)
    tokens_per_second: float = option(1e6, above=0)  # that the CPU cores of a rank tokenize


_NAMES = [option.name for option in fields(PlanOptions)]


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
    check_index(options.index, "index.", stores_vectors=True)
    if options.documents is None:
        message = "has no effect without documents; write documents=N to plan a search"
        for name in ("queries", "search_depth", "tokens_per_query", "search_tflops", "tokens_per_second"):
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


@dataclass(frozen=True)
class Planned:
    """A plan of any kind."""

    fits: bool  # in memory
    content: dict[str, Any]  # plain values
    show: "Callable[[Page], None]"


def run(options: tuple[Recipe | Pipeline, PlanOptions]) -> None:
    """Print the plan of a training, search or pipeline; with `json`, nothing else is written to standard output."""
    import json

    from embedtrain.tracking.pages import Page

    planned = make_plan(options)
    if options[1].json:
        print(json.dumps(planned.content, indent=2))
    else:
        planned.show(Page())
    if not planned.fits:
        raise SystemExit(1)


def make_plan(options: tuple[Recipe | Pipeline, PlanOptions]) -> Planned:
    """The plan of a training, search or pipeline."""
    from embedtrain.commands.plan.compute import plan, plan_search, print_search_plan
    from embedtrain.inference.loading.load import quiet_libraries

    recipe, plan_options = options
    quiet_libraries()
    if isinstance(recipe, Pipeline):
        stages = plan_pipeline(recipe, plan_options)
        return Planned(
            all(stage.training is None or stage.training.best.fits for stage in stages),
            {"pipeline": recipe.name, "stages": [stage.as_json() for stage in stages]},
            lambda page: print_pipeline_plan(page, recipe, stages),
        )
    if plan_options.documents is not None:
        search = plan_search(recipe, plan_options)
        return Planned(search.fits, search.as_json(), lambda page: print_search_plan(page, search))
    result = plan(recipe, plan_options)

    def show(page: "Page") -> None:
        print_plan(page, result)
        for line in describe_accelerate_config(recipe):
            page.note(line, "dim")

    return Planned(result.best.fits, result.as_json(), show)


_MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "loss": "embeddings and loss",
    "gathered": "unsharded weights",
    "reducing": "gradients being reduced",
    "pictures": "pixels",
}
_HOST_MEMORY = {
    "weights": "weights, with CPU offload",
    "gradients": "gradients, with CPU offload",
    "optimizer": "optimizer, with CPU offload",
    "checkpoint": "copies for asynchronous checkpoints",
    "pictures": "pixels of prepared batches",
    "processes": "libraries and batches, at most",
}
_TRAFFIC = {
    "all_gather": "all-gathers of weights",
    "reduce_scatter": "reduce-scatters of gradients",
    "all_reduce": "all-reduces over replicas",
    "embeddings": "embeddings",
}
_PICTURES = "documents are planned as pictures; a token of one counts {:.2f} in train.chunk_tokens, more if it is large"


def _rows(labels: Mapping[str, str], candidates: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """A row for each kind of memory; pixels only where there are any."""
    kinds = [kind for kind in labels if kind != "pictures" or any(by_kind[kind] for by_kind in candidates)]
    return [[labels[kind], *(_gib(by_kind[kind]) for by_kind in candidates)] for kind in kinds]


def print_plan(page: "Page", plan: "TrainingPlan") -> None:
    """Print the plan to the page."""
    candidates = [plan.best] if plan.next_best is None else [plan.best, plan.next_best]
    header = ["", "chosen", "next best"][: 1 + len(candidates)]
    page.heading(f"plan of {plan.name}")
    page.facts([*_model(plan), *((f"group {label}", text) for label, text in plan.parameter_groups.items())])
    page.subheading("strategy")
    layouts = [("chosen", f"{plan.best.name}: {plan.best.layout.reason}")]
    if plan.next_best is not None:
        layouts.append(("next best", f"{plan.next_best.name}{'' if plan.next_best.fits else ', which does not fit'}"))
    page.facts(layouts)
    page.subheading("memory per GPU, GiB")
    rows = _rows(_MEMORY, [c.memory.by_kind for c in candidates])
    rows.append(["total", *(_gib(c.memory.total) for c in candidates)])
    page.table(header, [*rows, ["peak in", *(c.memory.phase for c in candidates)]])
    page.note(
        f"{plan.cluster.memory / 2**30:.1f} GiB per GPU, of which {plan.cluster.usable / 2**30:.1f} are usable: the "
        "rest is reserved for the driver and the communication library",
        "dim",
    )
    page.subheading("host memory per node, GiB")
    rows = _rows(_HOST_MEMORY, [c.host.by_kind for c in candidates])
    page.table(header, [*rows, ["total", *(_gib(c.host.total) for c in candidates)]])
    if plan.cluster.host_memory is not None:
        usable = plan.cluster.usable_on_host / 2**30
        page.note(f"{plan.cluster.host_memory / 2**30:.1f} GiB per node, of which {usable:.1f} are usable", "dim")
    page.subheading("traffic sent per GPU and step, GB")
    rows = [[label, *(_gb(getattr(c.traffic, kind)) for c in candidates)] for kind, label in _TRAFFIC.items()]
    page.table(header, [*rows, ["total", *(_gb(c.traffic.bytes) for c in candidates)]])
    page.subheading("duration of a step, seconds")
    page.table(header, _durations(candidates))
    cluster = plan.cluster
    page.note(
        f"estimates for {cluster.flops / 1e12:g} TFLOP/s per GPU (tflops=), {cluster.bandwidth_node / 1e9:g} GB/s "
        f"within a node (bandwidth_node=) and {cluster.bandwidth_network / 1e9:g} GB/s between nodes "
        "(bandwidth_network=)",
        "dim",
    )
    page.subheading("chunks")
    page.facts(_chunks(plan))
    if plan.changes:
        page.subheading("it does not fit; changes with which it would")
        for line in plan.changes:
            page.note(line)


def _model(plan: "TrainingPlan") -> list[tuple[str, str]]:
    model, weights, cluster, work = plan.model, plan.model.weights, plan.cluster, plan.work
    parameters = f"{weights.parameters:,} parameters"
    if weights.trained < weights.parameters:
        frozen = ", ".join(f"{size / 2**30:.2f} GiB in {name}" for name, size in weights.frozen_by_dtype.items())
        parameters += f", {weights.trained:,} of them trained; frozen: {frozen}"
    groups = f"{len(weights.blocks)} layers of {weights.largest_block.elements:,}, root of {weights.root.elements:,}"
    if weights.embedding.elements:
        groups += f", embedding of {weights.embedding.elements:,}"
    texts, scores_pairs = work.rows * work.texts_per_row, model.dimension == 1
    computed = "one score a pair" if scores_pairs else f"embeddings of {model.dimension:,}"
    if model.vectors != (1, 1):
        queries, documents = model.vectors
        computed = f"vectors of {model.dimension:,}: {queries:,} a query, {documents:,} a document"
    kind, head = "pairs" if scores_pairs else "texts", plan.vocabulary_head
    rows = [] if head is None else [("vocabulary head", _vocabulary_head(head))]
    return [
        ("model", f"{model.name}, {parameters}"),
        ("", f"{groups}; computes in {model.precision.value}, {computed}"),
        *rows,
        ("hardware", f"{cluster.ranks:,} GPUs, {cluster.per_node} per node"),
        (
            "batch",
            f"{work.rows:,} rows, {texts:,} {kind} of {work.tokens_per_text:,} tokens; {plan.local.texts:,} per GPU",
        ),
        *([] if work.picture_cost == 1.0 else [("", _PICTURES.format(work.picture_cost))]),
        *(("", sentence) for sentence in plan.assumptions),
    ]


def _vocabulary_head(head: "VocabularyHead") -> str:
    return (
        f"{head.words:,} words in {head.blocks:,} blocks of {head.block_words:,}, {_gib(head.logits)} GiB of logits at "
        f"a time; {_gib(head.weights)} GiB of weights of words until the backward pass; {head.flops / 1e12:,.2f} TFLOP "
        "per GPU and step"
    )


def _durations(candidates: "list[LayoutCandidate]") -> list[list[str]]:
    parts = [("computation", "compute"), ("communication that computation does not hide", "exposed")]
    if any(candidate.traffic.offload for candidate in candidates):
        parts.append(("CPU offload", "offload"))
    rows = [[label, *(f"{getattr(c.traffic, name):.3f}" for c in candidates)] for label, name in parts]
    hidden = [f"{max(0.0, c.traffic.communication - c.traffic.exposed):.3f}" for c in candidates]
    return [
        *rows,
        ["total", *(f"{c.traffic.seconds:.3f}" for c in candidates)],
        ["communication that it hides", *hidden],
    ]


def _chunks(plan: "TrainingPlan") -> list[tuple[str, str]]:
    local, largest, chunk = plan.local, plan.largest_chunk, plan.work.chunk_tokens
    tokens = local.texts * plan.work.cost_per_text  # of a GPU in a step
    encoded_twice = ", the others are encoded twice" * (local.num_cached_graphs < local.chunks)
    chunks = f"{local.chunks:,} per step and GPU, memory for {local.num_cached_graphs:,} cached graphs{encoded_twice}"
    if chunk > tokens:
        chunks = f"one chunk has all {tokens:,} tokens of a GPU in a step"
    if largest is None:
        text = "none: not even one text fits"
    elif largest >= tokens:
        text = f"any: one chunk with all {tokens:,} tokens of a GPU in a step fits"
    else:
        text = f"train.chunk_tokens={largest}"
    return [("of the recipe", f"train.chunk_tokens={chunk}: {chunks}"), ("largest that fits", text)]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of the plan."""

    stage: Stage
    status: str  # `ended`, `begun`, or `to run`
    training: "TrainingPlan | None"  # of a training
    length: str  # of a training: its steps or epochs
    disk: int | None  # bytes of checkpoints and of the model; None: the stage writes none, or its size is not known

    def as_json(self) -> dict[str, Any]:
        """The stage as plain values; `plan` is that of a training, or null."""
        return {
            "stage": self.stage.name,
            "do": self.stage.command.name,
            "status": self.status,
            "uses": list(self.stage.depends),
            "directory": str(self.stage.directory),
            "disk": self.disk,
            "plan": None if self.training is None else self.training.as_json(),
        }


def plan_pipeline(pipeline: Pipeline, options: PlanOptions) -> list[StagePlan]:
    """Plan every stage; the model of an earlier stage that is not there yet has the architecture of what it is from."""
    from embedtrain.commands.plan.compute import plan
    from embedtrain.pipeline.disk import architecture, disk_of_stage
    from embedtrain.pipeline.state import PipelineState

    state = PipelineState(pipeline)
    plans = []
    mined = {s.directory: s.options.negatives for s in pipeline.stages if s.command.name == "mine"}
    for stage in pipeline.stages:
        record = state.read(stage)
        status = "to run" if record is None else "begun" if record.ended is None else "ended"
        training, length, disk = None, "", disk_of_stage(pipeline, stage)
        if stage.is_training:
            recipe: Recipe = stage.options
            recipe = replace(recipe, model=architecture(pipeline, recipe.model))
            training = plan(recipe, options, mined=mined)
            train = recipe.train
            length = f"{train.epochs:g} epochs" if train.steps is None else f"{train.steps:,} steps"
        plans.append(StagePlan(stage, status, training, length, disk))
    return plans


def print_pipeline_plan(page: "Page", pipeline: Pipeline, plans: list[StagePlan]) -> None:
    """Print the stages, and below them memory, duration and disk space of the trainings."""
    page.heading(f"plan of the pipeline {pipeline.name}, in {pipeline.output_dir}")
    page.subheading("stages, in this order")
    rows = [[p.stage.name, p.stage.command.name, p.status, ", ".join(p.stage.depends) or "-"] for p in plans]
    page.table(["stage", "do", "status", "uses the results of"], rows)
    trainings = [(p, p.training) for p in plans if p.training is not None]
    if not trainings:
        return
    page.subheading("trainings")
    header = ["stage", "parameters", "layout", "memory, GiB", "fits", "seconds a step", "length", "disk"]
    page.table(
        header,
        [
            [
                p.stage.name,
                f"{training.model.weights.parameters:,}",
                training.best.name,
                f"{training.best.memory.total / 2**30:,.2f}",
                "yes" if training.best.fits else "no",
                f"{training.best.traffic.seconds:.3f}",
                p.length,
                format_bytes(p.disk or 0),
            ]
            for p, training in trainings
        ],
    )
    total = sum(p.disk or 0 for p in plans)
    page.note(f"disk: at most {format_bytes(total)} for checkpoints and models of all stages", "dim")
    for p, training in trainings:
        for line in training.changes:
            page.note(f"{p.stage.name} does not fit: stages.{p.stage.name}.{line}")
