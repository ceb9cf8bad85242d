"""Print a plan: model, layout, memory, traffic and duration of a step, and what to change if it does not fit."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from embedtrain.commands.plan.compute import TrainingPlan, VocabularyHead, plan
from embedtrain.config.recipe import Recipe
from embedtrain.pipeline.disk import architecture, disk_of_stage
from embedtrain.pipeline.state import PipelineState
from embedtrain.pipeline.types import Pipeline, Stage
from embedtrain.planning.strategy import LayoutCandidate
from embedtrain.tracking.pages import Page
from embedtrain.utils.formatting import format_bytes

if TYPE_CHECKING:
    from embedtrain.commands.plan import PlanOptions

_MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "loss": "embeddings and loss",
    "gathered": "unsharded weights",
    "reducing": "gradients being reduced",
}
_TRAFFIC = {
    "all_gather": "all-gathers of weights",
    "reduce_scatter": "reduce-scatters of gradients",
    "all_reduce": "all-reduces over replicas",
    "embeddings": "embeddings",
}
_UNKNOWN_ROWS = (
    "the rows are not here: their negatives are those that data.train asks for; texts_per_row=N counts a query, its "
    "positive and all negatives"
)


def print_plan(page: Page, plan: TrainingPlan) -> None:
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
    rows = [[label, *(_gib(c.memory.by_kind[kind]) for c in candidates)] for kind, label in _MEMORY.items()]
    rows.append(["total", *(_gib(c.memory.total) for c in candidates)])
    page.table(header, [*rows, ["peak in", *(c.memory.phase for c in candidates)]])
    page.note(
        f"{plan.cluster.memory / 2**30:.1f} GiB per GPU, of which {plan.cluster.usable / 2**30:.1f} are usable: the "
        "rest is reserved for the driver and the communication library",
        "dim",
    )
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


def _model(plan: TrainingPlan) -> list[tuple[str, str]]:
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
        *([] if plan.knows_rows else [("", _UNKNOWN_ROWS)]),
    ]


def _vocabulary_head(head: VocabularyHead) -> str:
    return (
        f"{head.words:,} words in {head.blocks:,} blocks of {head.block_words:,}, {_gib(head.logits)} GiB of logits at "
        f"a time; {_gib(head.weights)} GiB of weights of words until the backward pass; {head.flops / 1e12:,.2f} TFLOP "
        "per GPU and step"
    )


def _durations(candidates: list[LayoutCandidate]) -> list[list[str]]:
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


def _chunks(plan: TrainingPlan) -> list[tuple[str, str]]:
    local, largest, chunk = plan.local, plan.largest_chunk, plan.work.chunk_tokens
    tokens = local.texts * plan.work.tokens_per_text  # of a GPU in a step
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
    training: TrainingPlan | None  # of a training
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


def plan_pipeline(pipeline: Pipeline, options: "PlanOptions") -> list[StagePlan]:
    """Plan every stage; the model of an earlier stage that is not there yet has the architecture of what it is from."""
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


def print_pipeline_plan(page: Page, pipeline: Pipeline, plans: list[StagePlan]) -> None:
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
