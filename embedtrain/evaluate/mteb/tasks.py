"""From names on the command line to tasks of mteb: its tasks, or all of one of its benchmarks."""

import difflib
import importlib.util
import logging
import warnings
from collections.abc import Sequence
from typing import Any

from embedtrain.errors import ConfigError


def resolve_tasks(names: Sequence[str], reserved_names: Sequence[str] = ()) -> list[Any]:
    """The tasks that are meant, in this order, each once.

    Args:
        names: of tasks, as `mteb.get_task` knows them, or of benchmarks, as `mteb.get_benchmark` does.
        reserved_names: names that figures are reported under already.

    Raises:
        ConfigError: mteb is not installed, there is no task of such a name, it is not about texts alone,
            or its name is taken.
    """
    if importlib.util.find_spec("mteb") is None:
        raise ConfigError(f"mteb={list(names)} needs a package that is not installed: pip install 'embedtrain[mteb]'")
    import mteb
    from mteb.benchmarks import get_benchmarks
    from mteb.get_tasks import TASK_LIST

    _quiet()
    known = {task.metadata.name for task in TASK_LIST}
    benchmarks = {name: one for one in get_benchmarks() for name in (one.name, *(one.aliases or ()))}
    found: list[Any] = []
    for name in names:
        if name in known:
            found.append(mteb.get_task(name))
        elif name in benchmarks:
            found += benchmarks[name].tasks
        else:
            near = difflib.get_close_matches(name, [*known, *benchmarks], n=3)
            raise ConfigError(
                f"mteb: {name!r} is no task and no benchmark of mteb {mteb.__version__}"
                + (f"; did you mean {' or '.join(near)}?" if near else "; `mteb available-tasks` lists its tasks")
            )
    for task in found:
        if task.metadata.name in reserved_names:
            raise ConfigError(
                f"mteb: {task.metadata.name} is the name of an evaluation set too; "
                f"write {{path: ..., name: ...}} in sets for another"
            )
        others = [kind for kind in task.metadata.modalities if kind != "text"]
        if others:
            raise ConfigError(f"mteb: {task.metadata.name} is about {' and '.join(others)}; models here read text")
    # Subsets and splits may differ between a task and the same task in a benchmark.
    return list({(t.metadata.name, tuple(t.hf_subsets), tuple(t.eval_splits)): t for t in found}.values())


def _quiet() -> None:
    """Keep mteb's log and the libraries' bars off the terminal; progress is shown by whoever encodes."""
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("mteb").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="mteb")
