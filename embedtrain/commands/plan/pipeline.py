"""The plan of a pipeline: its stages, what each uses, and memory and time of its trainings."""

from dataclasses import dataclass, replace
from typing import Any

from embedtrain.commands.plan.compute import TrainingPlan, plan
from embedtrain.commands.plan.options import PlanOptions
from embedtrain.config.recipe import Recipe
from embedtrain.pipeline.disk import architecture, disk_of_stage
from embedtrain.pipeline.state import PipelineState
from embedtrain.pipeline.types import Pipeline, Stage
from embedtrain.tracking.pages import Page
from embedtrain.utils.formatting import format_bytes


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


def plan_pipeline(pipeline: Pipeline, options: PlanOptions) -> list[StagePlan]:
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
