"""Runs the stages of a pipeline one after the other in one process group, and resumes where an earlier command ended.

OUTPUT_DIR/pipeline.yaml   the resolved recipe
OUTPUT_DIR/lineage.json    the stages that have ended, with digests, inputs, ranks, versions and metrics
OUTPUT_DIR/report.html     the trainings of the pipeline on one page
OUTPUT_DIR/stopped.json    exists from when a signal stops the pipeline until it resumes
OUTPUT_DIR/run.lock        held while the pipeline runs
"""

import contextlib
import functools
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from embedtrain import __version__
from embedtrain.checkpoint.run_directory import output_dir_lock
from embedtrain.config.commands import MODEL
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.recipe import ExportConfig
from embedtrain.config.validation import written
from embedtrain.distributed.device import deterministic_algorithms
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.world import World, joined_world
from embedtrain.errors import ConfigError, Stopped
from embedtrain.formats.export_record import RECORD
from embedtrain.formats.hub import require_export_support
from embedtrain.pipeline.disk import require_disk_space
from embedtrain.pipeline.state import PipelineState, StageRecord
from embedtrain.pipeline.types import Pipeline, Stage, naming
from embedtrain.report.page import REPORT_FILE, Table, write_report
from embedtrain.tracking.console import Console
from embedtrain.tracking.pages import Page
from embedtrain.training.train import train
from embedtrain.utils.files import Checksums, atomic_write, remove_tree
from embedtrain.utils.formatting import format_count, format_duration

LOCK, STAGES = "run.lock", "stages"
_FILES = ("pipeline.yaml", "lineage.json", "report.html", "stopped.json", "from.json", "state.json")
_UNLIMITED = 10 * 365 * 86400.0  # seconds
LINEAGE_FILE = "lineage.json"
_CARD_HEADING = "## How this model was made"
_SKIP, _BEGIN, _RESUME = "skip", "begin", "resume"


def run_pipeline(pipeline: Pipeline, signals: StopSignals | None = None) -> None:
    """Run the stages that the command selects and that have not ended. Every rank calls it.

    Raises Stopped after a signal in a training; in other stages a signal ends the process at once, with the same exit
    code, and the stage resumes from what it has written.
    """
    signals = signals or StopSignals()
    with joined_world(pipeline.timeout) as world:
        console = Console(enabled=world.is_main)
        root = pipeline.output_dir
        with world.fail_together("creating the directory of the pipeline"):
            if world.is_main:
                root.mkdir(parents=True, exist_ok=True)
                _require_own(pipeline)
        ranks = f"{format_count(world.size, 'rank')} ({world.device.type})"
        console.note(f"pipeline {pipeline.name}, {format_count(len(pipeline.stages), 'stage')} on {ranks}, in {root}")
        with output_dir_lock(root / LOCK, world, pipeline.timeout):
            _PipelineRun(pipeline, world, signals, console).run()


def _require_own(pipeline: Pipeline) -> None:
    """Raise ConfigError if the directory is that of one training, or if files of the user would be replaced."""
    root, state = pipeline.output_dir, PipelineState(pipeline)
    if (root / "recipe.yaml").exists():
        raise ConfigError(f"output_dir={root} is the directory of one training: choose another output_dir")
    if (root / STAGES).is_symlink():
        raise ConfigError(f"{root / STAGES} is a link, through which nothing is written: delete it")
    for stage in pipeline.stages:
        state.require_own(stage)
    for name in () if (root / LOCK).exists() else (*_FILES, STAGES):
        if os.path.lexists(root / name):
            raise ConfigError(
                f"output_dir={root} contains {name}, which no pipeline has written, and which would be replaced: name "
                f"another output_dir (in a copy of a pipeline, create an empty {LOCK})"
            )


class _PipelineRun:
    """One command: all its stages, in order."""

    def __init__(self, pipeline: Pipeline, world: World, signals: StopSignals, console: Console) -> None:
        self.pipeline, self.world, self.signals, self.console = pipeline, world, signals, console
        self.state = PipelineState(pipeline)

    def run(self) -> None:
        world, root = self.world, self.pipeline.output_dir
        with world.fail_together("writing the directory of the pipeline"):
            if world.is_main:
                (root / "stopped.json").unlink(missing_ok=True)
                self._set_aside()
                with atomic_write(root / "pipeline.yaml") as file:
                    text = yaml.safe_dump(self.pipeline.resolved, sort_keys=False, allow_unicode=True)
                    file.write_text(text, encoding="utf-8")
                self._require_exports()
                require_disk_space(self.pipeline, [stage for stage in self._selected() if not self._has_ended(stage)])
        for stage in self._selected():
            self._run_stage(stage)
        with world.fail_together("writing the report"):
            if world.is_main:
                if self.pipeline.selection.until is None and not self.pipeline.selection.only:
                    (root / "from.json").unlink(missing_ok=True)
                report = write_pipeline_report(self.pipeline, self.state)
                if report is not None:
                    self.console.note(f"report: {report}")

    def _require_exports(self) -> None:
        """Raise ConfigError before the first stage if a package is missing that a later one exports with."""
        for stage in self._selected():
            export = getattr(stage.options, "export", None)
            if isinstance(export, ExportConfig) and not self._has_ended(stage):
                with naming(stage.name):
                    require_export_support(export)

    def _selected(self) -> list[Stage]:
        selection, stages = self.pipeline.selection, self.pipeline.stages
        if selection.only:
            return [self.pipeline.stage(name) for name in selection.only]
        names = [stage.name for stage in stages]
        last = len(stages) if selection.until is None else names.index(selection.until) + 1
        return list(stages[:last])

    def _set_aside(self) -> None:
        """Set the stages of `from=` aside, once: the same command after an interruption resumes them."""
        start, marker = self.pipeline.selection.start, self.pipeline.output_dir / "from.json"
        if not start:
            return
        names = {*start, *(stage.name for name in start for stage in self.pipeline.dependents(name))}
        repeated = [stage for stage in self.pipeline.stages if stage.name in names]
        begun_before: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            begun_before = json.loads(marker.read_bytes())
        first = begun_before.get("from") != list(start)
        for stage in self.pipeline.stages:  # before anything is renamed
            if (
                stage not in repeated
                and self._has_ended(stage)
                and all(self._has_ended(self.pipeline.stage(name)) for name in stage.depends)
            ):
                self._action(stage)
        for stage in repeated:
            if first or self._differs(stage):
                path = self.state.set_aside(stage)
                if path is not None:
                    self.console.note(f"stage {stage.name}: its earlier result is now {path}")
        with atomic_write(marker) as file:
            file.write_text(json.dumps({"from": list(start)}) + "\n", encoding="utf-8")

    def _has_ended(self, stage: Stage) -> bool:
        record = self.state.read(stage)
        return record is not None and record.ended is not None

    def _differs(self, stage: Stage) -> bool:
        """Whether a stage was begun with other options or inputs than those of this command."""
        before = self.state.read(stage)
        if before is None:
            return False
        try:
            return before.digest != self.state.current(stage, ranks=self.world.size, versions={}).digest
        except ConfigError:  # the results that it uses have been set aside
            return True

    def _run_stage(self, stage: Stage) -> None:
        world, names = self.world, [other.name for other in self.pipeline.stages]
        number = f"{names.index(stage.name) + 1}/{len(names)}"
        action = _SKIP
        with world.fail_together(f"looking at the stage {stage.name}"):
            if world.is_main:
                action = self._action(stage)
        action = world.broadcast(action)
        if action == _SKIP:
            self.console.note(f"stage {number} {stage.name}: has ended before")
            return
        self.console.note("")
        resumed = ", resumed" if action == _RESUME else ""
        self.console.note(f"stage {number} {stage.name} ({stage.command.name}){resumed}, in {stage.directory}")
        started = time.monotonic()
        with world.fail_together(f"beginning the stage {stage.name}"):
            if world.is_main:
                self.state.require_own(stage)
                self._begin(stage, action)
        result = self._call(stage)
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        figures = figures_of(result)
        with world.fail_together(f"ending the stage {stage.name}"):
            if world.is_main:
                describe = functools.partial(describe_model, self.pipeline, self.state, stage)
                self.state.finish(stage, figures, describe)
                write_lineage(self.pipeline, self.state)
        self.console.note(f"stage {stage.name} took {format_duration(time.monotonic() - started)}")
        if world.is_main and "metrics" in figures:
            print_figures(self.pipeline, self.state)

    def _action(self, stage: Stage) -> str:
        """Whether to skip, begin or resume a stage; on one rank. Raises if it was run with something else."""
        before = self.state.read(stage)
        now = self.state.current(stage, ranks=self.world.size, versions=_versions())
        if before is None:
            return _BEGIN
        self.state.require_same(stage, before, now)
        if before.ended is None:
            return _RESUME
        for below in before.outputs:
            files = before.outputs[below]["files"]
            missing = next((name for name in files if not (stage.directory / name).exists()), None)
            if missing is not None:
                raise ConfigError(
                    f"{stage.directory / missing} has disappeared: restore it, or write from={stage.name} to repeat "
                    "the stage"
                )
        return _SKIP

    def _begin(self, stage: Stage, action: str) -> None:
        """Write stage.json, after the results that the stage uses were verified; on one rank."""
        self.state.verify_inputs(stage)
        if action == _RESUME and not stage.command.resumes:
            remove_tree(stage.directory)
        if not stage.is_training or action == _BEGIN:
            stage.directory.mkdir(parents=True, exist_ok=True)
        self.state.write(stage, self.state.current(stage, ranks=self.world.size, versions=_versions()))

    def _call(self, stage: Stage) -> Any:
        """Run the command of a stage on all ranks, or on rank 0 while the others wait."""
        world = self.world
        options: Any = None
        with world.fail_together(f"composing the stage {stage.name}"):
            options = stage.compose()
        with self._reporting_stop(stage):
            if stage.command.saves_on_signal:
                return self._stop_with(stage, options)
            if stage.command.ranks:
                return stage.command.run(options)
            result: Any = None
            with without_timeout(world) as waiting, waiting.fail_together(f"running the stage {stage.name}"):
                if world.is_main:
                    result = stage.command.run(options)
            return result

    def _stop_with(self, stage: Stage, options: Any) -> Any:
        """Run a command that ends with what it has done when a signal arrives."""
        try:
            if not stage.is_training:
                return stage.command.run(options, self.signals)
            with deterministic_algorithms(options.parallel.deterministic):
                return train(options, self.world, self.signals)
        except Stopped as stopped:
            if self.world.is_main:
                self._write_stopped(stage, self.signals.received)
            raise Stopped(f"stage {stage.name}: {stopped}", stopped.exit_code) from None

    @contextlib.contextmanager
    def _reporting_stop(self, stage: Stage) -> Iterator[None]:
        """Write stopped.json if a signal ends the process during the block."""
        report = self.signals.report
        watchdog = self.world.watchdog
        end: Callable[[signal.Signals], int] = report if watchdog is None else watchdog.end_after_signal

        def report_and_write(received: signal.Signals) -> int:
            code = end(received)
            if self.world.is_main:
                self._write_stopped(stage, received)
            return code

        self.signals.report = report_and_write
        try:
            yield
        finally:
            self.signals.report = end

    def _write_stopped(self, stage: Stage, received: signal.Signals | None) -> None:
        content: Mapping[str, Any] = {
            "stage": stage.name,
            "signal": None if received is None else written(received.name),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        with contextlib.suppress(OSError), atomic_write(self.pipeline.output_dir / "stopped.json") as file:
            file.write_text(json.dumps(content) + "\n", encoding="utf-8")


@contextlib.contextmanager
def without_timeout(world: World) -> Iterator[World]:
    """The same ranks, which wait for each other for any time: rank 0 may work for hours on a large corpus.

    The watchdog still ends the others if it is lost, and gloo if its process ends.
    """
    waiting = world.new_cpu_group(_UNLIMITED)
    try:
        yield waiting
    finally:
        dist.destroy_process_group(waiting.group)


def _versions() -> dict[str, str]:
    return {"embedtrain": __version__, "torch": torch.__version__}


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
