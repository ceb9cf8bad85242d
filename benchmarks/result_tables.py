"""The tables of docs/benchmarks.md, from the stored results of `make rivals`.

`python -m benchmarks.result_tables` replaces the lines between `<!-- results: NAME -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.figures import KINDS, OURS, RESULTS, ROOT, Run, runs_by_library
from benchmarks.measure import markdown
from benchmarks.rivals.libraries import ACTIVE_WORDS

PAGE = ROOT / "docs" / "benchmarks.md"
NAMES = {
    "tevatron": "Tevatron",
    "pylate": "PyLate",
    "lightning-ir": "Lightning IR",
    "accelerate": "accelerate, a loop written by hand",
}
_GENERATED = re.compile(r"(?<=^<!-- results: )(\w+)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Replace the tables of the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


def with_tables(page: str, results: Path) -> str:
    """The page with the tables of these results."""
    tables = write_tables(json.loads(results.read_text(encoding="utf-8")))
    return _GENERATED.sub(lambda found: f"{found[1]}{found[2]}\n{tables[found[1]]}\n\n", page)


def write_tables(results: dict[str, Any]) -> dict[str, str]:
    """The table of each kind of model, and those of speed, memory and start."""
    runs = results["runs"]
    kinds = [kind for kind in KINDS if any(run["kind"] == kind for run in runs)]
    tables = {kind: _quality(kind, results["before"][kind], runs) for kind in kinds}
    cells = {"speed": _step_time, "memory": _memory, "start": _start}
    return tables | {name: _by_kind(kinds, runs, cell) for name, cell in cells.items()}


def _quality(kind: str, before: dict[str, float], runs: Sequence[Run]) -> str:
    """The metrics of each library at equal steps and at equal wall time."""
    equal_steps, equal_time = (runs_by_library(runs, kind, mode) for mode in ("steps", "time"))
    header = ["library", *(f"{_heading(name)}, equal steps" for name in before)]
    header += ["steps in equal time", "wall time", *(f"{_heading(name)}, equal time" for name in before)]
    start = ["before training", *(_value(name, value) for name, value in before.items())]
    lines = [start + [""] * (2 + len(before))]
    for library, trained in equal_steps.items():
        cells = [_spread(name, trained) for name in before]
        if longer := equal_time.get(library):
            cells += [f"{longer[0]['steps']}", f"{median(run['seconds'] for run in longer):.0f} s"]
            cells += [_spread(name, longer) for name in before]
        else:  # none of its trainings finished
            cells += ["-"] * (2 + len(before))
        lines.append([NAMES.get(library, library), *cells])
    return markdown(header, lines)


def _heading(name: str) -> str:
    return name if name == ACTIVE_WORDS else f"`{name}`"


def _value(name: str, value: float) -> str:
    return f"{value:.0f}" if name == ACTIVE_WORDS else f"{value:.3f}"


def _spread(name: str, runs: Sequence[Run]) -> str:
    """Mean and standard deviation."""
    values = [run["metrics"][name] for run in runs]
    return _value(name, mean(values)) + (f" ± {_value(name, stdev(values))}" if len(values) > 1 else "")


def _by_kind(kinds: Sequence[str], runs: Sequence[Run], cell: Callable[[Sequence[Run], Sequence[Run]], str]) -> str:
    """A row for each library: `cell` of its trainings of each kind at equal steps, and of ours."""
    trained = {kind: runs_by_library(runs, kind, "steps") for kind in kinds}
    lines = []
    for library in dict.fromkeys(name for of_kind in trained.values() for name in of_kind):
        cells = [cell(of[library], of[OURS]) if library in of else "-" for of in trained.values()]
        lines.append([NAMES.get(library, library), *cells])
    return markdown(["library", *(KINDS[kind] for kind in kinds)], lines)


def _step_time(theirs: Sequence[Run], ours: Sequence[Run]) -> str:
    """Seconds of ours; of the others, the time relative to ours with the same seed."""
    if theirs is ours:
        return f"{median(run['step_seconds'] for run in ours):.2f} s"
    seconds = {run["seed"]: run["step_seconds"] for run in ours}
    ratios = [run["step_seconds"] / seconds[run["seed"]] for run in theirs if run["seed"] in seconds]
    return f"{median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}) times"


def _memory(theirs: Sequence[Run], _ours: Sequence[Run]) -> str:
    return f"{max(run['peak_mib'] for run in theirs):,}"


def _start(theirs: Sequence[Run], _ours: Sequence[Run]) -> str:
    return f"{median(run['first_step_seconds'] for run in theirs):.1f} s"


if __name__ == "__main__":
    main()
