"""The end of a run in words: how the main metric of each evaluation set has changed, and whether that is a loss."""

from collections.abc import Mapping
from pathlib import Path

from embedtrain.report.bootstrap import CONFIDENCE
from embedtrain.report.changes import Change, Comparisons, Evaluated
from embedtrain.report.runs import MEAN, read_runs
from embedtrain.tracking.metrics import MainChange, main_changes

_MAX_QUERIES = 20_000  # of a set; the bootstrap over more takes seconds


def describe_outcome(run_dir: Path, step: int, *, selects_best: bool, evaluates_between: bool) -> list[str]:
    """One line per set, as of `main_changes`, which says whether `step` is worse than step 0 or not clearly different.

    A hint follows unless the run `selects_best` by a metric.
    """
    lines: list[str] = []
    worse_sets: list[MainChange] = []
    mains = main_changes(run_dir, step)
    comparable = {main.name: main.metric for main in mains if main.first_step == 0 and main.last_step == step}
    changes = changes_since_start(run_dir, step, comparable) if comparable else {}
    for main in mains:
        change = changes.get(main.name)
        interval = "" if change is None or not change.interval else change.interval.replace("−", "-")
        if interval and change is not None and change.direction == "noise":
            lines.append(f"{main}: no clear change ({CONFIDENCE:.0%} interval of the difference {interval})")
        elif not main.is_worse or main.last_step != step:
            lines.append(str(main))
        else:
            range_text = f" ({CONFIDENCE:.0%} interval of the difference {interval})" if interval else ""
            which = "" if worse_sets else ": the exported model is below the one before training"
            lines.append(f"{main}, which is worse{range_text}{which}")
            worse_sets.append(main)
    if worse_sets and not selects_best:
        also = "" if evaluates_between else ", with evaluation.every=STEPS to have several to choose from"
        first = worse_sets[0]
        lines.append(f"checkpoint.best_metric={first.name}/{first.metric} exports the best evaluated step{also}")
    return lines


def changes_since_start(run_dir: Path, step: int, metrics: Mapping[str, str]) -> dict[str, Change]:
    """The changes from step 0 to `step` with their intervals, as set -> change; `metrics` names the metric of each set.

    A set is left out where a value is missing, or where its queries are too many to draw from.
    """
    try:
        (run,) = read_runs([run_dir])
    except Exception:  # an interval is not worth losing the run
        return {}
    comparisons = Comparisons()
    changes = {}
    for name, metric in metrics.items():
        names = [other for other in run.evaluations if other != MEAN] if name == MEAN else [name]
        if sum(run.datasets[other].counts.get("queries", 0) for other in names if other in run.datasets) > _MAX_QUERIES:
            continue
        change = comparisons.change(name, metric, Evaluated(run, 0), Evaluated(run, step))
        if change is not None:
            changes[name] = change
    return changes
