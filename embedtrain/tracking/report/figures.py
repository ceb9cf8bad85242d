"""What was logged while training, as groups of plots."""

from collections.abc import Sequence
from dataclasses import dataclass

from embedtrain.tracking.report.chart import Chart, Line, line_chart
from embedtrain.tracking.report.names import Group, metric_info, metric_order
from embedtrain.tracking.report.runs import Run

_POINTS = 900  # of all runs' lines in a plot together
_LEAST_POINTS, _MOST_POINTS = 80, 300
# Of unknown figures there may be as many as a user's loss likes.
MOST_CHARTS = 60


@dataclass(frozen=True, slots=True)
class MetricSection:
    """One group of plots: its heading, and how many figures were left out."""

    heading: str
    charts: tuple[Chart, ...]
    left_out: int = 0


def metric_sections(runs: Sequence[Run]) -> list[MetricSection]:
    """Plots of all figures that any run has logged, each with a line for each run that has it."""
    keys = sorted({key for run in runs for key, one in run.logged.items() if len(one.steps)}, key=metric_order)
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // max(1, len(runs))))
    every = [one.steps for run in runs for one in run.logged.values() if len(one.steps)]
    steps = (int(min(one[0] for one in every)), int(max(one[-1] for one in every))) if every else (0, 0)
    found = []
    for group in Group:
        own = [key for key in keys if metric_info(key).group is group]
        charts = tuple(_chart(key, runs, most, steps) for key in own[:MOST_CHARTS])
        if charts:
            found.append(MetricSection(group.value, charts, len(own) - len(charts)))
    return found


def _chart(key: str, runs: Sequence[Run], most: int, steps: tuple[int, int]) -> Chart:
    about = metric_info(key)
    lines = [
        Line(run.label, number, run.logged[key])
        for number, run in enumerate(runs)
        if key in run.logged and len(run.logged[key].steps)
    ]
    return line_chart(about.title, lines, meaning=about.meaning, form=about.form, most=most, steps=steps)
