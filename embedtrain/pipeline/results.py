"""What a pipeline reports: a table of metrics after each stage, lineage.json, and a page with it and all trainings."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embedtrain.config.commands import MODEL
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.formats.export_record import RECORD
from embedtrain.pipeline.state import PipelineState, StageRecord
from embedtrain.pipeline.types import Pipeline, Stage
from embedtrain.report.page import REPORT_FILE, Table, write_report
from embedtrain.tracking.pages import Page
from embedtrain.utils.files import Checksums, atomic_write
from embedtrain.utils.formatting import format_duration

LINEAGE_FILE = "lineage.json"
_CARD_HEADING = "## How this model was made"


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


def table_of(records: Sequence[tuple[Stage, StageRecord]]) -> Table:
    """The header and the rows of stages that have ended: their duration and the main metric of every set.

    Further forms of vectors, which are measured as SET@FORM, have rows of their own. Metrics of a subset have
    columns of their own: they are not comparable with those of the whole set.
    """
    rows: list[tuple[list[str], dict[str, str]]] = []
    for stage, record in records:
        duration = format_duration((record.ended or record.began) - record.began)
        forms: dict[str, dict[str, str]] = {"": {}}
        for name, values in _metrics(record).items():
            data, _, form = name.partition("@")
            subset = _subset(stage, data)
            for metric in list(values)[:1]:
                forms.setdefault(form, {})[f"{data} {metric}{subset}"] = f"{values[metric]:.4f}"
        for form, cells in forms.items():
            rows.append(
                ([f"{stage.name}: {form}", "", ""] if form else [stage.name, stage.command.name, duration], cells)
            )
    columns = list(dict.fromkeys(column for _, cells in rows for column in cells))
    return (
        ["stage", "do", "took", *columns],
        [[*row, *(cells.get(column, "") for column in columns)] for row, cells in rows],
    )


def _subset(stage: Stage, data: str) -> str:
    """What to add to the name of a metric that a stage has measured on a part of the set `data`."""
    options = getattr(stage.options, "evaluation", stage.options)  # a training has them in a group
    if not isinstance(options, EvaluationConfig) and stage.command.name != "evaluate":
        return ""
    of_sets = {one.name or Path(one.path).name: one.subset for one in options.sets if one.subset is not None}
    subset = of_sets.get(data, options.subset)
    return "" if subset is None else f" of {subset:,}"


def _metrics(record: StageRecord) -> dict[str, dict[str, float]]:
    return record.figures.get("metrics") or {}


def print_figures(pipeline: Pipeline, state: PipelineState) -> None:
    """Print the table of the stages that have ended; on one rank."""
    page = Page()
    page.subheading(f"{pipeline.name}: stages so far")
    page.table(*table_of(list(_ended(pipeline, state))))


def write_lineage(pipeline: Pipeline, state: PipelineState) -> None:
    """Write lineage.json, of all stages that have ended; on one rank."""
    _write_lineage(pipeline.output_dir / LINEAGE_FILE, pipeline, list(_ended(pipeline, state)))


def describe_model(pipeline: Pipeline, state: PipelineState, stage: Stage, record: StageRecord) -> None:
    """Add lineage.json to the model that a stage has written, and a section to its model card; on one rank.

    Both list the stages that the model comes from, and the evaluations of their models.
    """
    directory = stage.directory / stage.command.outputs.get(MODEL, "")
    if MODEL not in stage.command.outputs or not (directory / RECORD).is_file():
        return
    ancestors = set(pipeline.ancestors(stage.name))
    history = [
        (other, ended)
        for other, ended in _ended(pipeline, state)
        if other.name in ancestors or (other.command.name == "evaluate" and ancestors >= set(other.depends))
    ]
    _write_lineage(directory / LINEAGE_FILE, pipeline, [*history, (stage, record)])
    card = directory / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    header, rows = table_of([*history, (stage, record)])
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    section = [
        _CARD_HEADING,
        "",
        f"Stages of the pipeline `{pipeline.name}`; `{LINEAGE_FILE}` has their options and digests.",
    ]
    with atomic_write(card) as file:
        before = text.partition(f"\n{_CARD_HEADING}")[0].rstrip()
        file.write_text("\n".join([before, "", *section, "", *lines, ""]), encoding="utf-8")
    files = dict(Checksums.read(directory / RECORD).files)
    for name in (LINEAGE_FILE, card.name):
        files[name] = Checksums.of(directory / name).files["."]
    Checksums(files).write(directory / RECORD)


def _write_lineage(path: Path, pipeline: Pipeline, history: Sequence[tuple[Stage, StageRecord]]) -> None:
    stages = [
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
            "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.ended)),
            "seconds": round((record.ended or record.began) - record.began, 3),
            **record.figures,
        }
        for stage, record in history
    ]
    with atomic_write(path) as file:
        text = json.dumps({"pipeline": pipeline.name, "stages": stages}, indent=1, ensure_ascii=False)
        file.write_text(f"{text}\n", encoding="utf-8")


def write_pipeline_report(pipeline: Pipeline, state: PipelineState) -> Path | None:
    """Write the page about all stages that have ended; None if no training is among them. On one rank."""
    records = list(_ended(pipeline, state))
    directories = [stage.directory for stage, _ in records if stage.is_training]
    if not directories:
        return None
    path = pipeline.output_dir / REPORT_FILE
    write_report(directories, path, table_of(records))
    return path
