"""The plan of a pipeline: its stages, what each uses, and memory and time of its trainings."""

from dataclasses import dataclass, replace
from typing import Any

from embedtrain.config.recipe import ModelConfig, Recipe
from embedtrain.formatting import format_bytes
from embedtrain.pipeline.registry import MODEL, PRUNE, TRAIN
from embedtrain.pipeline.state import PipelineState
from embedtrain.pipeline.types import Pipeline, Stage
from embedtrain.plan.compute import TrainingPlan, plan
from embedtrain.plan.options import PlanOptions
from embedtrain.tracking.pages import Page

# Bytes of a parameter in a checkpoint: fp32 weights, and two moments of those that are trained.
_WEIGHT_BYTES, _MOMENT_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of the plan."""

    stage: Stage
    status: str  # `ended`, `begun`, or `to run`
    training: TrainingPlan | None  # of a training
    length: str  # of a training: its steps or epochs
    disk: int | None  # bytes of the checkpoints and the model of a training

    def as_json(self) -> dict[str, Any]:
        """The stage as plain values; `plan` is that of a training, or null."""
        return {
            "stage": self.stage.name,
            "do": self.stage.kind.name,
            "status": self.status,
            "uses": list(self.stage.depends),
            "directory": str(self.stage.directory),
            "disk": self.disk,
            "plan": None if self.training is None else self.training.as_json(),
        }


def plan_pipeline(pipeline: Pipeline, options: PlanOptions) -> list[StagePlan]:
    """Plan every stage; the model of an earlier stage that is not there yet has the architecture of what it is from."""
    state = PipelineState(pipeline)
    plans = []
    for stage in pipeline.stages:
        record = state.read(stage)
        status = "to run" if record is None else "begun" if record.ended is None else "ended"
        training, length, disk = None, "", None
        if stage.kind.name == TRAIN:
            recipe: Recipe = stage.options
            training = plan(replace(recipe, model=_architecture(pipeline, recipe.model)), options)
            train = recipe.train
            length = f"{train.epochs:g} epochs" if train.steps is None else f"{train.steps:,} steps"
            weights = training.model.weights
            checkpoint = _WEIGHT_BYTES * weights.parameters + _MOMENT_BYTES * weights.trained
            # Besides those that are kept, a new one while it is written.
            disk = checkpoint * (recipe.checkpoint.keep + 1) + _WEIGHT_BYTES * weights.parameters
        plans.append(StagePlan(stage, status, training, length, disk))
    return plans


def _architecture(pipeline: Pipeline, model: ModelConfig) -> ModelConfig:
    """Model options with the path or configuration from which an earlier stage has started, until its model exists."""
    producer = next(
        (stage for stage in pipeline.stages if MODEL in stage.kind.outputs and stage.output(MODEL) == model.path), None
    )
    if producer is None or (producer.directory / producer.kind.outputs[MODEL] / "config.json").is_file():
        return model
    if producer.kind.name == TRAIN:
        base = _architecture(pipeline, producer.options.model)
        names = ("path", "config", "tokenizer", "vocab_size", "revision", "heads")
        changes = {name: getattr(base, name) for name in names}
        for name in ("pooling", "max_length"):
            changes[name] = getattr(base, name) if getattr(model, name) is None else getattr(model, name)
        return replace(model, **changes)
    for name in producer.depends:
        earlier = pipeline.stage(name)
        if MODEL in earlier.kind.outputs:
            whole = _architecture(pipeline, replace(model, path=earlier.output(MODEL)))
            return _pruned(whole, producer.options) if producer.kind.name == PRUNE else whole
    # A model from outside, such as one that is pruned.
    path, pooling = (getattr(producer.options, name, None) for name in (MODEL, "pooling"))
    return replace(model, path=path or model.path, pooling=pooling if model.pooling is None else model.pooling)


def _pruned(model: ModelConfig, options: Any) -> ModelConfig:
    """The architecture with the layers that `prune` keeps if the recipe contains it, otherwise the whole one."""
    if model.config is None:
        return model
    layers = options.keep if options.layers is None else len(options.layers)
    return replace(model, config=dict(model.config) | {"num_hidden_layers": layers})


def print_pipeline_plan(page: Page, pipeline: Pipeline, plans: list[StagePlan]) -> None:
    """Print the stages, and below them memory, duration and disk space of the trainings."""
    page.heading(f"plan of the pipeline {pipeline.name}, in {pipeline.output_dir}")
    page.subheading("stages, in this order")
    rows = [[p.stage.name, p.stage.kind.name, p.status, ", ".join(p.stage.depends) or "-"] for p in plans]
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
    page.note(f"disk: at most {format_bytes(total)} for checkpoints and models of all trainings", "dim")
    for p, training in trainings:
        for line in training.changes:
            page.note(f"{p.stage.name} does not fit: stages.{p.stage.name}.{line}")
