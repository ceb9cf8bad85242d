"""The end of a run in words: how the main metric of each evaluation set has changed, and whether that is a loss."""

from pathlib import Path

from embedtrain.tracking.metrics import MainChange, main_changes
from embedtrain.tracking.report.bootstrap import CONFIDENCE
from embedtrain.tracking.report.changes import Change, Comparisons, Evaluated
from embedtrain.tracking.report.runs import MEAN, Run, read_runs

_MAX_QUERIES = 20_000  # of a set; the bootstrap over more takes seconds


def describe_outcome(run_dir: Path, step: int, *, selects_best: bool, evaluates_between: bool) -> list[str]:
    """One line per set, as of `main_changes`; those say so where the exported `step` is worse than step 0.

    A hint follows unless the run `selects_best` by a metric.
    """
    lines: list[str] = []
    worse_sets: list[MainChange] = []
    runs: list[Run] | None = None
    comparisons = Comparisons()
    for main in main_changes(run_dir, step):
        if not main.is_worse or main.last_step != step:
            lines.append(str(main))
            continue
        runs = _read(run_dir) if runs is None else runs
        change = _change(runs, main, comparisons)
        interval = "" if change is None or not change.interval else change.interval.replace("−", "-")
        if interval and change is not None and change.direction == "noise":
            lines.append(f"{main}: no clear change ({CONFIDENCE:.0%} interval of the difference {interval})")
            continue
        range_text = f" ({CONFIDENCE:.0%} interval of the difference {interval})" if interval else ""
        which = "" if worse_sets else ": the exported model is below the one before training"
        lines.append(f"{main}, which is worse{range_text}{which}")
        worse_sets.append(main)
    if worse_sets and not selects_best:
        also = "" if evaluates_between else ", with evaluation.every=STEPS to have several to choose from"
        first = worse_sets[0]
        lines.append(f"checkpoint.best_metric={first.name}/{first.metric} exports the best evaluated step{also}")
    return lines


def _read(run_dir: Path) -> list[Run]:
    try:
        return read_runs([run_dir])
    except Exception:  # an interval is not worth losing the run
        return []


def _change(runs: list[Run], main: MainChange, comparisons: Comparisons) -> Change | None:
    if not runs:
        return None
    (run,) = runs
    names = [name for name in run.evaluations if name != MEAN] if main.name == MEAN else [main.name]
    if sum(run.datasets[name].counts.get("queries", 0) for name in names if name in run.datasets) > _MAX_QUERIES:
        return None
    before, after = Evaluated(run, main.first_step), Evaluated(run, main.last_step)
    return comparisons.change(main.name, main.metric, before, after)
