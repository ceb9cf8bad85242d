"""The figures of docs/benchmarks.md, drawn from the stored results of `make rivals`.

`python -m benchmarks.figures` writes docs/assets/images/benchmarks-NAME.svg, and the same for dark pages.
"""

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.rivals.libraries import ACTIVE_WORDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "rivals" / "results.json"
IMAGES = ROOT / "docs" / "assets" / "images"
OURS = "embedtrain"
KINDS = {"dense": "dense", "reranker": "reranker", "late_interaction": "late interaction", "sparse": "sparse"}
THEMES = {"": {"text": "#1f2328", "grid": "#d0d7de"}, "-dark": {"text": "#e6edf3", "grid": "#30363d"}}
ACCENT, OTHER, BEFORE = "#2f81f7", "#8b949e", "#bf8700"
ERROR: dict[str, Any] = {"capsize": 2}
Run = dict[str, Any]


def main() -> None:
    """Draw all figures."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, draw in {"quality": quality, "speed": speed, "gradients": gradients}.items():
        for suffix, colors in THEMES.items():
            _save(f"benchmarks-{name}{suffix}", colors, lambda draw=draw: draw(results))


def quality(results: dict[str, Any]) -> None:
    """nDCG@10 at equal wall time: a panel for each kind of model and evaluation set, with standard deviations."""
    kinds = _kinds(results["runs"], "time")
    sets = [name for name in results["before"][kinds[0]] if name != ACTIVE_WORDS]
    figure, panels = plt.subplots(len(kinds), len(sets), figsize=(4.4 * len(sets), 1.9 * len(kinds)), squeeze=False)
    for kind, row in zip(kinds, panels, strict=True):
        for name, axes in zip(sets, row, strict=True):
            of_library = runs_by_library(results["runs"], kind, "time")
            values = {library: [run["metrics"][name] for run in runs] for library, runs in of_library.items()}
            _points(axes, values, f"{KINDS[kind]}, {name}")
            axes.axvline(results["before"][kind][name], color=BEFORE, linewidth=1, linestyle="--")
    figure.supxlabel("nDCG@10 at equal wall time; dashed: before training", fontsize=9)


def speed(results: dict[str, Any]) -> None:
    """Real tokens per second of the trainings at equal steps."""
    kinds = _kinds(results["runs"], "steps")
    rows = math.ceil(len(kinds) / 2)
    figure, panels = plt.subplots(rows, 2, figsize=(8.8, 1.9 * rows), squeeze=False)
    for axes in panels.flat[len(kinds) :]:
        axes.remove()
    for kind, axes in zip(kinds, panels.flat, strict=False):
        of_library = runs_by_library(results["runs"], kind, "steps")
        values = {
            library: [run["tokens_per_step"] / run["step_seconds"] for run in runs]
            for library, runs in of_library.items()
        }
        _bars(axes, values, KINDS[kind])
    figure.supxlabel("real tokens per second, two CPU ranks", fontsize=9)


def gradients(results: dict[str, Any]) -> None:
    """Relative error of the gradient over four ranks."""
    rows = [row for row in results["gradients"] if row["error"] is not None]
    _, axes = plt.subplots(figsize=(7, 0.32 * len(rows) + 0.8))
    labels = [f"{row['library']}, {KINDS[row['kind']]}" for row in rows][::-1]
    values = [max(row["error"], 1e-8) for row in rows][::-1]
    colors = [ACCENT if row["library"] == OURS else OTHER for row in rows][::-1]
    axes.barh(labels, values, color=colors, height=0.65)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xlabel("relative error of the gradient on 4 ranks", fontsize=9)


def _kinds(runs: Sequence[Run], mode: str) -> list[str]:
    return [kind for kind in KINDS if any(run["kind"] == kind and run["mode"] == mode for run in runs)]


def runs_by_library(runs: Sequence[Run], kind: str, mode: str) -> dict[str, list[Run]]:
    """The trainings of a kind of model at equal `steps` or equal `time`."""
    chosen = [run for run in runs if run["kind"] == kind and run["mode"] == mode]
    return {
        name: [run for run in chosen if run["library"] == name] for name in dict.fromkeys(r["library"] for r in chosen)
    }


def _bars(axes: Axes, values: dict[str, list[float]], title: str) -> None:
    """A bar from 0 for each library."""
    names, means, deviations = _summarize(values)
    axes.barh(names, means, xerr=deviations, color=_colors(names), height=0.65, error_kw=ERROR)
    axes.set_title(title, fontsize=9, loc="left")


def _points(axes: Axes, values: dict[str, list[float]], title: str) -> None:
    """A point for each library, on an axis that does not start at 0."""
    names, means, deviations = _summarize(values)
    for name, value, deviation, color in zip(names, means, deviations, _colors(names), strict=True):
        axes.errorbar([value], [name], xerr=[deviation], fmt="o", color=color, markersize=5, **ERROR)
    axes.margins(y=0.2)
    axes.locator_params(axis="x", nbins=5)
    axes.set_title(title, fontsize=9, loc="left")


def _summarize(values: dict[str, list[float]]) -> tuple[list[str], list[float], list[float]]:
    """Names from bottom to top, means, and standard deviations."""
    names = list(values)[::-1]
    deviations = [stdev(values[name]) if len(values[name]) > 1 else 0.0 for name in names]
    return names, [mean(values[name]) for name in names], deviations


def _colors(names: Sequence[str]) -> list[str]:
    return [ACCENT if name == OURS else OTHER for name in names]


def _save(name: str, colors: dict[str, str], draw: Callable[[], None]) -> None:
    style = {
        "font.size": 8,
        "svg.fonttype": "none",  # text stays text
        "font.sans-serif": ["DejaVu Sans"],  # a list is written with every text
        "svg.hashsalt": "embedtrain",  # the same bytes each time
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "x",
        "axes.axisbelow": True,
        "grid.color": colors["grid"],
        "axes.edgecolor": colors["grid"],
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colors["text"]),
    }
    with plt.rc_context(style):
        draw()
        plt.tight_layout()
        content = io.StringIO()
        plt.savefig(content, format="svg", transparent=True, metadata={"Date": None})
        plt.close()
    # A third of matplotlib's file is indentation, comments, names of groups, and digits that no screen shows.
    unused = r'<!--.*?-->|(?<=\n) +| id="[a-z.]+\w*_\d+"| transform="rotate\(-0[^"]*"'
    smaller = re.sub(unused, "", content.getvalue(), flags=re.DOTALL)
    smaller = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", smaller)
    (IMAGES / f"{name}.svg").write_text(re.sub(r"\n+", "\n", smaller), encoding="utf-8")


if __name__ == "__main__":
    main()
