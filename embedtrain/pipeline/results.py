"""What a pipeline reports: a table of metrics after each stage, lineage.json, and a page about its trainings."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from embedtrain.files import atomic_write
from embedtrain.formatting import format_duration
from embedtrain.pipeline.registry import TRAIN
from embedtrain.pipeline.state import PipelineState, StageRecord
from embedtrain.pipeline.types import Pipeline, Stage
from embedtrain.tracking.pages import Page
from embedtrain.tracking.report.page import REPORT_FILE, write_report

LINEAGE_FILE = "lineage.json"


def figures_of(result: Any) -> dict[str, Any]:
    """What a command has returned, as far as it consists of numbers: metrics by set, and the step of a model."""
    metrics = result if isinstance(result, Mapping) else getattr(result, "metrics", None)
    figures: dict[str, Any] = {}
    if isinstance(metrics, Mapping) and all(isinstance(values, Mapping) for values in metrics.values()):
        figures["metrics"] = {str(name): dict(values) for name, values in metrics.items()}
    if isinstance(step := getattr(result, "step", None), int):
        figures["step"] = step
    return figures


def _ended(pipeline: Pipeline, state: PipelineState) -> Iterator[tuple[Stage, StageRecord]]:
    for stage in pipeline.stages:
        record = state.read(stage)
        if record is not None and record.ended is not None:
            yield stage, record


def metric_table(pipeline: Pipeline, state: PipelineState) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the stages that have ended: their duration and the main metric of every set."""
    records = list(_ended(pipeline, state))
    columns: dict[tuple[str, str], None] = {}
    for _, record in records:
        for name, values in _metrics(record).items():
            if values:
                columns[name, next(iter(values))] = None
    rows = []
    for stage, record in records:
        duration = format_duration((record.ended or record.began) - record.began)
        cells = [_metrics(record).get(name, {}).get(metric) for name, metric in columns]
        rows.append([stage.name, stage.kind.name, duration, *("" if v is None else f"{v:.4f}" for v in cells)])
    return ["stage", "do", "took", *(f"{name} {metric}" for name, metric in columns)], rows


def _metrics(record: StageRecord) -> dict[str, dict[str, float]]:
    return record.figures.get("metrics") or {}


def print_figures(pipeline: Pipeline, state: PipelineState) -> None:
    """Print the table of the stages that have ended; on one rank."""
    page = Page()
    page.subheading(f"{pipeline.name}: stages so far")
    page.table(*metric_table(pipeline, state))


def lineage(pipeline: Pipeline, state: PipelineState) -> dict[str, Any]:
    """How the models of a pipeline came about: every stage that has ended, with what it was made from."""
    stages = []
    for stage, record in _ended(pipeline, state):
        ended = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.ended))
        stages.append(
            {
                "stage": stage.name,
                "do": record.do,
                "digest": record.digest,
                "uses": list(stage.depends),
                "inputs": record.inputs,
                "outputs": {below: output["digest"] for below, output in record.outputs.items()},
                "options": record.options,
                "ranks": record.ranks,
                "versions": record.versions,
                "ended": ended,
                "seconds": round((record.ended or record.began) - record.began, 3),
                **record.figures,
            }
        )
    return {"pipeline": pipeline.name, "stages": stages}


def write_lineage(pipeline: Pipeline, state: PipelineState) -> None:
    """Write lineage.json; on one rank."""
    with atomic_write(pipeline.output_dir / LINEAGE_FILE) as file:
        text = json.dumps(lineage(pipeline, state), indent=1, ensure_ascii=False)
        file.write_text(f"{text}\n", encoding="utf-8")


def write_pipeline_report(pipeline: Pipeline, state: PipelineState) -> Path | None:
    """Write the page about all trainings that have ended; None if there is none. On one rank."""
    directories = [stage.directory for stage, _ in _ended(pipeline, state) if stage.kind.name == TRAIN]
    if not directories:
        return None
    path = pipeline.output_dir / REPORT_FILE
    write_report(directories, path)
    return path
