"""What `evaluate` measures of the sets, one after the other: the model, first stages, and the reranker after each.

    dev                 search with the model
    dev+reranker        its best documents, ordered by the reranker
    dev+bm25            BM25
    dev+bm25+reranker   its best documents, ordered by the reranker

`dev+run` is the order of the run file that a set names as its `candidates`. Sets of pairs, and of candidates in no
order, only have the model's and the reranker's row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embedtrain.commands.evaluate.mteb_client import resolve_tasks
from embedtrain.config.evaluation import BM25, MODEL, SUITES
from embedtrain.config.validation import written
from embedtrain.data.cache.cache import Cache, writable_cache_directory
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.evaluation.evaluator import (
    EvaluationFunction,
    Evaluator,
    check_function_name,
    function_name,
    load_function,
)
from embedtrain.evaluation.first_stage import (
    check_scored_sets,
    has_scores,
    limit_candidates,
    with_bm25_candidates,
    with_rankings,
)
from embedtrain.evaluation.metrics import MEAN, RETRIEVAL_METRICS, required_depth
from embedtrain.evaluation.sets import load_sets
from embedtrain.evaluation.types import CompressedVectors, LoadedSet, RetrievalSet
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.report.changes import CONFIDENCE, interval
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import QueryMetrics

if TYPE_CHECKING:
    from embedtrain.commands.evaluate import EvaluateOptions


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is measured."""

    sets: Sequence[LoadedSet]
    tasks: Sequence[Any]  # of mteb; empty on ranks other than 0
    function: EvaluationFunction | None


def read_inputs(options: "EvaluateOptions", world: World, console: Console) -> Inputs:
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
        tasks = []
        if (options.mteb or options.suite) and world.is_main:
            tasks = resolve_tasks(options.mteb, names, options.suite)
    for suite in options.suite:
        console.note(f"suite {suite}: {SUITES[suite].benchmark} of mteb, {SUITES[suite].quoted}")
    return Inputs(sets, tasks, function)


def _is_searched(loaded: LoadedSet) -> bool:
    return isinstance(loaded.data, RetrievalSet) and loaded.data.candidates is None


def _read_sets(options: "EvaluateOptions", world: World, console: Console) -> list[LoadedSet]:
    directory = writable_cache_directory(None, Path(options.output_dir) / "cache", world, console.note)
    cache = Cache.of_world(directory, world)
    sets = load_sets(options.sets, world, subset=options.subset, metrics=options.metrics, cache=cache, option="sets")
    with world.fail_together("verifying cached documents"):
        cache.verification.wait()
    for note in (note for loaded in sets for note in loaded.notes):
        console.note(note)
    return sets


RERANKED = "+reranker"


@dataclass(frozen=True, slots=True)
class Models:
    """The models of an evaluation, at least one of them."""

    encoder: SentenceEncoder | None
    scorer: PairScorer | SentenceEncoder | None  # of the reranker, a late-interaction model encodes texts
    vector_cache: VectorCache | None = None  # of the encoder
    function: EvaluationFunction | None = None  # measures the encoder after the sets
    compressed: CompressedVectors | None = None  # forms of the encoder's vectors to measure


@dataclass(frozen=True, slots=True)
class Stage:
    """An evaluator, and what its rows in metrics.jsonl have besides the metrics."""

    evaluator: Evaluator
    origin: Mapping[str, str]


def stages(options: "EvaluateOptions", sets: Sequence[LoadedSet], models: Models, world: World) -> Iterator[Stage]:
    """All stages in order; a stage must be evaluated before the next one is taken. A collective."""
    rankings: Mapping[str, Mapping[str, Sequence[int]]] = {}
    stage_names, depth = options.first_stages, options.rerank_depth
    reranked_by = {} if options.reranker is None else {"reranker": str(options.reranker.path)}
    common: dict[str, Any] = {"world": world, "index": options.index}
    if models.encoder is not None:
        evaluator = Evaluator(
            sets,
            models.encoder,
            truncate_dims=options.truncate_dims,
            compressed=models.compressed,
            vector_cache=models.vector_cache,
            function=models.function,
            keep_rankings=depth if MODEL in stage_names else 0,
            **common,
        )
        yield Stage(evaluator, {"model": options.model})
        rankings = evaluator.rankings
    if models.scorer is None:
        return

    def reranked(prepared: Sequence[LoadedSet], name: str) -> Iterator[Stage]:
        if prepared:
            best = [limit_candidates(loaded, depth) for loaded in prepared]
            suffix = RERANKED if name == MODEL else f"+{name}{RERANKED}"
            first = options.model if name == MODEL else name
            origin = ({"model": first} if first else {}) | reranked_by
            yield Stage(Evaluator(best, models.scorer, suffix=suffix, **common), origin)

    def measured_and_reranked(prepared: Sequence[LoadedSet], name: str) -> Iterator[Stage]:
        if prepared:
            yield Stage(Evaluator(prepared, None, suffix=f"+{name}", **common), {"model": name})
        yield from reranked(prepared, name)

    searched = [loaded for loaded in sets if _candidates_of(loaded) == "search"]
    if BM25 in stage_names:
        yield from measured_and_reranked(
            [with_bm25_candidates(loaded, max(depth, _depth(loaded)), world) for loaded in searched], BM25
        )
    runs = [replace(loaded, metrics=_metrics(loaded)) for loaded in sets if _candidates_of(loaded) == "run"]
    yield from measured_and_reranked(runs, "run")
    # Those of the model and those without a first stage, whose rows have the same suffix and share a mean.
    others = [
        with_rankings(loaded, rankings[loaded.data.name], MODEL, depth)
        if _candidates_of(loaded) == "search"
        else loaded
        for loaded in sets
        if _candidates_of(loaded) == "own" or (MODEL in stage_names and _candidates_of(loaded) == "search")
    ]
    yield from reranked(others, MODEL)


def _candidates_of(loaded: LoadedSet) -> str | None:
    """`search` if the whole corpus is searched, `run` for an ordered run, `own` for others; None: no pairs to score."""
    if not isinstance(loaded.data, RetrievalSet):
        return "own" if has_scores(loaded) else None
    if loaded.data.candidates is None:
        return "search"
    return "own" if loaded.data.first_stage is None else "run"


def _metrics(loaded: LoadedSet) -> tuple[str, ...]:
    return loaded.metrics or RETRIEVAL_METRICS


def _depth(loaded: LoadedSet) -> int:
    """Documents per query that the metrics of a set need."""
    return required_depth(_metrics(loaded))


def describe_gains(measured: Mapping[str, QueryMetrics]) -> Iterator[str]:
    """A line for each set that was measured before and after the reranker, about its first metric.

    `measured` has the metrics of each query by the names of sets, as `dev+bm25` and `dev+bm25+reranker`.
    """
    for name, after in measured.items():
        before = measured.get(name.removesuffix(RERANKED))
        if before is None or before is after:
            continue
        metric = next((metric for metric in after.metrics if metric in before.metrics), None)
        if metric is None:
            continue
        column, other = after.metrics.index(metric), before.metrics.index(metric)
        values = dict(zip(before.queries, before.values[:, other].tolist(), strict=True))
        differences = after.values[:, column] - np.array([values[query] for query in after.queries])
        low, high = interval([differences])
        verdict = "better" if low > 0 else "worse" if high < 0 else "not clearly different"
        yield (
            f"{name.removesuffix(RERANKED)}: the reranker is {verdict}, {metric} {differences.mean():+.4f} "
            f"({CONFIDENCE:.0%} interval {low:+.4f} to {high:+.4f}, {len(differences):,} queries)"
        )
