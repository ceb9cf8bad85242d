"""Renders runs as one HTML file without external resources."""

import base64
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from embedtrain import __version__
from embedtrain.config.compose import to_plain
from embedtrain.config.kinds import KINDS, load_kind
from embedtrain.config.losses import LOSSES
from embedtrain.config.recipe import Recipe
from embedtrain.report.changes import CONFIDENCE, RESAMPLES, Comparisons
from embedtrain.report.chart import Chart, NumberFormat, format_value
from embedtrain.report.runs import RunRecords, Series, Status, common_steps_per_epoch, read_runs
from embedtrain.report.sample_section import sample_section, shorten
from embedtrain.report.sections import MainMetric, evaluation_sections, main_metric, metric_sections, vector_sections
from embedtrain.utils.files import atomic_write
from embedtrain.utils.formatting import format_duration

REPORT_FILE, COMPARISON_FILE = "report.html", "comparison.html"
# The sections of one sample are a third of the page.
MAX_SAMPLES = 4
# Limits a recipe file that expands without end (aliases within aliases).
MAX_OPTIONS = 5000
_MAX_DEPTH = 12
_VALUE_LENGTH = 400
_FOLDER = Path(__file__).with_name("page")
Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a run as text."""

    loss: str  # the first and the last
    steps: str
    ranks: str
    duration: str
    rate: str  # rows per second
    memory: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in words, at the top of the page."""

    label: str
    directory: str
    status: str
    error: str
    model: str
    base: str  # a short name of the model, which tells apart the models before training of several runs
    figures: Figures
    main: MainMetric | None
    exported: str


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a recipe: its dotted name, its value as text, and whether that is the default."""

    name: str
    value: str
    is_default: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """One option or version that is not the same in all runs: a value per run, None where it is not set."""

    name: str
    values: tuple[str | None, ...]


def write_report(directories: Sequence[Path], path: Path, stages: Table | None = None) -> None:
    """Write the report of the runs in `directories` atomically to `path`; DataError if a folder is not a run.

    `stages` are the header and the rows of the stages of a pipeline.
    """
    content = render(read_runs(directories), stages)
    with atomic_write(path) as temporary:
        # A lone surrogate, which JSON may contain, has no bytes in UTF-8.
        temporary.write_bytes(content.encode("utf-8", errors="replace"))


def render(runs: Sequence[RunRecords], stages: Table | None = None) -> str:
    """The report of the runs as HTML."""
    charts: list[Chart] = []

    def number(chart: Chart) -> int:
        charts.append(chart)
        return len(charts) - 1

    comparisons = Comparisons()
    style, script = map(page_file, ("page.css", "page.js"))
    samples = [section for run in runs[:MAX_SAMPLES] if (section := sample_section(run)) is not None]
    return template("page.html").render(
        title=" · ".join(run.label for run in runs),
        several=len(runs) > 1,
        stages=stages,
        summaries=[_summarize(run, comparisons) for run in runs],
        sessions=[(run.label, _sessions(run)) for run in runs],
        sets=evaluation_sections(runs, comparisons),
        forms=vector_sections(runs),
        resamples=f"{RESAMPLES:,}",
        confidence=f"{CONFIDENCE:.0%}",
        has_epochs=common_steps_per_epoch(runs) is not None,
        sections=metric_sections(runs),
        samples=samples,
        samples_omitted=len(runs) > MAX_SAMPLES,
        recipes=[(run.label, options_of(run), {str(k): str(v) for k, v in run.versions.items()}) for run in runs],
        option_differences=_differences([dict(_flatten(run.recipe)) for run in runs]),
        version_differences=_differences([_versions(run) for run in runs]),
        notes=[note for run in runs for note in run.notes],
        created=time.strftime("%Y-%m-%d %H:%M"),
        version=__version__,
        style=Markup(style),  # noqa: S704  # our own files
        script=Markup(script),  # noqa: S704
        style_hash=content_hash(style),
        script_hash=content_hash(script),
        number=number,
        points=lambda: Markup(_json([chart.points for chart in charts])),  # noqa: S704  # "<" is escaped in it
    )


def page_file(name: str) -> str:
    """The text of a style or script of the pages."""
    return (_FOLDER / name).read_text(encoding="utf-8")


@functools.cache  # compiling it takes as long as rendering it
def template(name: str) -> Template:
    """A page of this folder."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,  # whatever a run holds is text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def content_hash(text: str) -> str:
    """What a Content-Security-Policy allows an inline script or style by, and no others."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(value: object) -> str:
    """JSON that cannot close the element that contains it."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _summarize(run: RunRecords, comparisons: Comparisons) -> RunSummary:
    sessions, status = run.history.sessions, run.history.status
    error = sessions[-1].end.error if sessions and status is Status.failed else None
    total = run.total_steps
    steps = f"{run.last_step:,}" if not total or total == run.last_step else f"{run.last_step:,} of {total:,}"
    ranks = list(dict.fromkeys(str(session.ranks) for session in sessions))
    ranks = ranks or [str(run.versions.get("world_size", "—"))]
    devices = sessions[-1].devices if sessions else ""
    loss = run.logged.get("loss")
    return RunSummary(
        label=run.label,
        directory=str(run.directory),
        status=status.value,
        error=shorten(error, 400) if error else "",
        model=_model(run),
        base=_base(run),
        figures=Figures(
            loss="—" if loss is None or not len(loss.finite) else _first_and_last(loss),
            steps=steps,
            ranks=f"{', then '.join(ranks)}{f' ({devices})' if devices else ''}",
            duration=_duration(run.history.seconds),
            rate=_median(run.logged.get("samples_per_s"), NumberFormat.rate),
            memory=_highest(run.logged.get("memory_gib")),
        ),
        main=main_metric(run, comparisons),
        exported="" if run.exported is None else _exported(run, run.exported),
    )


def _model(run: RunRecords) -> str:
    path = run.option("model", "path")
    if path:
        return shorten(str(path), 120)
    model_type = run.option("model", "config", "model_type")
    return f"{model_type}, from random weights" if model_type else "—"


def _base(run: RunRecords) -> str:
    """The id on the Hub, or the last two parts of a path."""
    path = run.option("model", "path")
    return shorten("/".join(Path(str(path)).parts[-2:]), 60) if path else _model(run)


def _exported(run: RunRecords, directory: Path) -> str:
    step, check = run.history.exported_step, run.history.export_check
    text = str(directory) if step is None else f"{directory}, weights of step {step:,}"
    return text if check is None else f"{text} ({check})"


def _first_and_last(series: Series) -> str:
    first, last = float(series.finite[0]), float(series.finite[-1])
    return f"{last:.3g}" if len(series.finite) == 1 else f"{first:.3g} → {last:.3g}"


def _median(series: Series | None, form: NumberFormat) -> str:
    """The median, because the first steps of a run are slower than all others."""
    if series is None or not len(series.finite):
        return "—"
    values = sorted(series.finite.tolist())
    return format_value(values[len(values) // 2], form)


def _highest(series: Series | None) -> str:
    return "—" if series is None or not len(series.finite) else f"{series.finite.max():.1f} GiB"


def _duration(seconds: float | None) -> str:
    return "—" if seconds is None else format_duration(seconds)


def _sessions(run: RunRecords) -> list[tuple[str, ...]]:
    """The sessions of a run, formatted."""
    sessions = run.history.sessions
    rows: list[tuple[str, ...]] = []
    for number, session in enumerate(sessions):
        is_last = number + 1 == len(sessions)
        how = session.end.how or (run.history.status.value if is_last else Status.ended.value)
        seconds = None if session.end.ended is None else max(0.0, session.end.ended - session.started)
        rows.append(
            (
                time.strftime("%Y-%m-%d %H:%M", time.localtime(session.started)),
                f"{session.ranks} ({session.devices})",
                f"{session.step:,}",
                "—" if session.end.last_step is None else f"{session.end.last_step:,}",
                _duration(seconds),
                how,
            )
        )
    return rows


def options_of(run: RunRecords) -> dict[str, list[Option]]:
    """The options of the recipe by group; options without a group come first, under ``""``."""
    defaults = _flat_defaults(run.recipe)
    groups: dict[str, list[Option]] = {"": []}
    for name, value in _flatten(run.recipe):
        group = name.partition(".")[0].partition("[")[0]
        option = Option(name, value, defaults.get(name) == value)
        groups.setdefault("" if group == name else group, []).append(option)
    return {group: options for group, options in groups.items() if options}


def _versions(run: RunRecords) -> dict[str, str]:
    """The versions of the libraries, and the device."""
    versions = {str(name): _as_text(value) for name, value in run.versions.items()}
    if run.history.sessions:
        versions["device"] = run.history.sessions[-1].devices
    return versions


def _differences(values_of_runs: Sequence[Mapping[str, str]]) -> list[Difference]:
    """Names whose values differ, including names that only some runs have."""
    names = dict.fromkeys(itertools.chain.from_iterable(values_of_runs))
    rows = [Difference(name, tuple(values.get(name) for values in values_of_runs)) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]


def _flatten(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The innermost options and their values as text."""
    return list(itertools.islice(_leaves("", recipe, 0), MAX_OPTIONS))


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    match value:
        case Mapping() if value and depth < _MAX_DEPTH:
            for key, inner in value.items():
                yield from _leaves(f"{name}.{key}" if name else str(key), inner, depth + 1)
        case list() if any(isinstance(inner, Mapping | list) for inner in value) and depth < _MAX_DEPTH:
            for index, inner in enumerate(value):
                yield from _leaves(f"{name}[{index}]", inner, depth + 1)
        case _:
            yield name, _as_text(value)


def _as_text(value: Any) -> str:
    """A value as in YAML, on one line."""
    if isinstance(value, str):
        text = value if value and value == value.strip() and "\n" not in value else repr(value)
    elif isinstance(value, Mapping | list):
        text = repr(value) if value else str(value)
    else:
        text = yaml.safe_dump(value, width=10_000).removesuffix("\n...\n").strip()
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]} ..."


def _flat_defaults(recipe: Mapping[str, Any]) -> dict[str, str]:
    defaults = to_plain(Recipe())
    loss = recipe.get("loss")
    loss_class = LOSSES.get(str(loss.get("name"))) if isinstance(loss, Mapping) else None
    if loss_class is not None:
        defaults["loss"] = to_plain(loss_class())
    model = recipe.get("model")
    # A kind whose code only this file names is not imported: its own options have no defaults here.
    if isinstance(model, Mapping) and model.get("kind") in KINDS:
        defaults["model"] = to_plain(load_kind(model["kind"]).model_options()) | {"kind": defaults["model"]["kind"]}
    return dict(_flatten(defaults))
