"""What `evaluate` reads before any model is loaded: evaluation sets, tasks of mteb, and a function of the user."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.commands.evaluate.mteb_client import resolve_tasks
from embedtrain.commands.evaluate.options import EvaluateOptions
from embedtrain.config.validation import written
from embedtrain.data.cache.cache import Cache, writable_cache_directory
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.evaluation.evaluator import EvaluationFunction, check_function_name, function_name, load_function
from embedtrain.evaluation.first_stage import check_scored_sets
from embedtrain.evaluation.metrics import MEAN
from embedtrain.evaluation.sets import load_sets
from embedtrain.evaluation.types import LoadedSet, RetrievalSet
from embedtrain.tracking.console import Console


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is measured."""

    sets: Sequence[LoadedSet]
    tasks: Sequence[Any]  # of mteb; empty on ranks other than 0
    function: EvaluationFunction | None


def read_inputs(options: EvaluateOptions, world: World, console: Console) -> Inputs:
    """Read them all. A collective; errors are raised on every rank."""
    function: EvaluationFunction | None = None
    with world.fail_together("importing code"):
        if options.function is not None:
            function = load_function(options.function, "function")
    sets = _read_sets(options, world, console)
    with world.fail_together("reading evaluation sets"):
        if not options.model:
            check_scored_sets(sets, "sets")
        if options.first_stage is not None and not any(map(_is_searched, sets)):
            raise ConfigError(
                f"first_stage={written(options.first_stage)}: has no effect: no set is searched, for they have "
                "candidates of their own or compare pairs; leave it out"
            )
    with world.fail_together("looking up the tasks of mteb"):
        names = [loaded.data.name for loaded in sets]
        if function is not None:
            check_function_name(function, {*names, MEAN}, "function")
            names.append(function_name(function))
        tasks = resolve_tasks(options.mteb, names) if options.mteb and world.is_main else []
    return Inputs(sets, tasks, function)


def _is_searched(loaded: LoadedSet) -> bool:
    return isinstance(loaded.data, RetrievalSet) and loaded.data.candidates is None


def _read_sets(options: EvaluateOptions, world: World, console: Console) -> list[LoadedSet]:
    directory = writable_cache_directory(None, Path(options.output_dir) / "cache", world, console.note)
    cache = Cache.of_world(directory, world)
    sets = load_sets(options.sets, world, subset=options.subset, metrics=options.metrics, cache=cache, option="sets")
    with world.fail_together("verifying cached documents"):
        cache.verification.wait()
    for note in (note for loaded in sets for note in loaded.notes):
        console.note(note)
    return sets
