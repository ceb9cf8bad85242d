"""The page: all that is known of some runs in one HTML file, which asks no network for anything."""

import base64
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from embedtrain import __version__
from embedtrain.files import atomic_write
from embedtrain.tracking.report.chart import Chart
from embedtrain.tracking.report.differences import differences, options_of, version_differences
from embedtrain.tracking.report.evaluations import MainMetric, evaluation_sections, main_metric
from embedtrain.tracking.report.figures import metric_sections
from embedtrain.tracking.report.names import NumberFormat, duration, written
from embedtrain.tracking.report.runs import Run, Series, Status, read_runs
from embedtrain.tracking.report.samples import sample_section, shown

REPORT_FILE, COMPARISON_FILE = "report.html", "comparison.html"
# Of each the sample's figures are a third of the page.
MOST_SAMPLES = 4
_FOLDER = Path(__file__).with_name("page")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run is, in words: one line of the table at the top."""

    label: str
    directory: str
    status: str
    failed: str  # with what
    model: str
    steps: str
    ranks: str
    duration: str
    loss: str
    rate: str
    memory: str
    main: MainMetric | None
    exported: str


def write_report(directories: Sequence[Path], to: Path) -> None:
    """Write the report of some runs.

    Args:
        directories: of the runs.
        to: the file, replaced whole or not at all.

    Raises:
        DataError: a folder is no run.
        OSError: the file cannot be written.
    """
    content = render(read_runs(directories))
    with atomic_write(to) as file:
        # A lone surrogate, which JSON can carry, has no bytes in UTF-8.
        file.write_bytes(content.encode("utf-8", errors="replace"))


def render(runs: Sequence[Run]) -> str:
    """The report of some runs as HTML."""
    charts: list[Chart] = []

    def number(chart: Chart) -> int:
        charts.append(chart)
        return len(charts) - 1

    style, script = (_own(name) for name in ("page.css", "page.js"))
    samples = [figures for run in runs[:MOST_SAMPLES] if (figures := sample_section(run)) is not None]
    return _template().render(
        title=" · ".join(run.label for run in runs),
        several=len(runs) > 1,
        heads=[_summarize(run) for run in runs],
        sessions=[(run.label, _sessions(run)) for run in runs],
        sets=evaluation_sections(runs),
        groups=metric_sections(runs),
        samples=samples,
        samples_left_out=len(runs) > MOST_SAMPLES,
        recipes=[(run.label, options_of(run), {str(k): str(v) for k, v in run.versions.items()}) for run in runs],
        different=differences(runs),
        versions=version_differences(runs),
        notes=[note for run in runs for note in run.notes],
        made=time.strftime("%Y-%m-%d %H:%M"),
        by=__version__,
        style=Markup(style),  # noqa: S704  # our own files
        script=Markup(script),  # noqa: S704
        style_hash=_hash(style),
        script_hash=_hash(script),
        number=number,
        points=lambda: Markup(_json([chart.points for chart in charts])),  # noqa: S704  # "<" is escaped in it
    )


@functools.cache  # to compile it takes as long as to fill it
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,  # whatever a run holds is text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a Content-Security-Policy names an inline script or style by, and no other runs."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(value: object) -> str:
    """JSON in which nothing can end the element it stands in."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _summarize(run: Run) -> RunSummary:
    failed = run.sessions[-1].error if run.sessions and run.status is Status.failed else None
    total = run.total_steps
    steps = f"{run.last_step:,}" if not total or total == run.last_step else f"{run.last_step:,} of {total:,}"
    ranks = list(dict.fromkeys(str(session.ranks) for session in run.sessions))
    ranks = ranks or [str(run.versions.get("world_size", "—"))]
    devices = run.sessions[-1].devices if run.sessions else ""
    loss = run.logged.get("loss")
    return RunSummary(
        label=run.label,
        directory=str(run.directory),
        status=run.status.value,
        failed=shown(failed, 400) if failed else "",
        model=_model(run),
        steps=steps,
        ranks=f"{', then '.join(ranks)}{f' ({devices})' if devices else ''}",
        duration=duration(run.seconds),
        loss="—" if loss is None or not len(loss.finite) else _course(loss),
        rate=_median(run.logged.get("samples_per_s"), NumberFormat.rate),
        memory=_highest(run.logged.get("memory_gib")),
        main=main_metric(run),
        exported="" if run.exported is None else _exported(run, run.exported),
    )


def _model(run: Run) -> str:
    path = run.option("model", "path")
    if path:
        return shown(str(path), 120)
    kind = run.option("model", "config", "model_type")
    return f"{kind}, from random weights" if kind else "—"


def _exported(run: Run, directory: Path) -> str:
    step = run.sessions[-1].exported if run.sessions else None
    return str(directory) if step is None else f"{directory}, weights of step {step:,}"


def _course(series: Series) -> str:
    first, last = float(series.finite[0]), float(series.finite[-1])
    return f"{last:.3g}" if len(series.finite) == 1 else f"{first:.3g} → {last:.3g}"


def _median(series: Series | None, form: NumberFormat) -> str:
    """The middle one: the first steps of a run are slower than all others."""
    if series is None or not len(series.finite):
        return "—"
    values = sorted(series.finite.tolist())
    return written(values[len(values) // 2], form)


def _highest(series: Series | None) -> str:
    return "—" if series is None or not len(series.finite) else f"{series.finite.max():.1f} GiB"


def _sessions(run: Run) -> list[tuple[str, ...]]:
    """When a run was under way: each time in words."""
    rows: list[tuple[str, ...]] = []
    for number, one in enumerate(run.sessions):
        last = number + 1 == len(run.sessions)
        how = one.how or (run.status.value if last else Status.ended.value)
        took = None if one.ended is None else one.ended - one.started
        rows.append(
            (
                time.strftime("%Y-%m-%d %H:%M", time.localtime(one.started)),
                f"{one.ranks} ({one.devices})",
                f"{one.step:,}",
                "—" if one.last_step is None else f"{one.last_step:,}",
                duration(took),
                how,
            )
        )
    return rows
