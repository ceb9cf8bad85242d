"""Evaluates a live model on its sets, on all ranks."""

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.evaluation import IndexConfig
from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.errors import ConfigError, EvaluationInterrupted
from embedtrain.evaluation.dataset_info import dataset_info
from embedtrain.evaluation.metrics import MEAN, RETRIEVAL_METRICS, check_retrieval_metrics
from embedtrain.evaluation.tasks.context import EncodedSet, EncoderContext, EvaluationContext, ScorerContext
from embedtrain.evaluation.tasks.labels import (
    CLUSTERING_METRICS,
    classification_metrics,
    measure_classification,
    measure_clustering,
)
from embedtrain.evaluation.tasks.pairs import (
    BITEXT_METRICS,
    PAIR_CLASSIFICATION_METRICS,
    STS_METRICS,
    measure_bitext,
    measure_pair_classification,
    measure_sts,
)
from embedtrain.evaluation.tasks.rankings import (
    RERANKING_METRICS,
    measure_first_stage,
    measure_reranking,
    measure_retrieval,
)
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    EvaluationData,
    LabelledPairs,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
)
from embedtrain.formatting import format_duration
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.score import PairScorer
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.tracking.metrics import DATASET, DatasetInfo
from embedtrain.tracking.query_metrics import QueryMetrics

if TYPE_CHECKING:
    from embedtrain.evaluation.sentence_transformers import TextEncoder

# Called with the name of a set, its metrics, and what was measured.
ResultCallback = Callable[[str, Mapping[str, float], DatasetInfo], None]
# Called with the name of a set, and the metrics of each of its queries.
QueryCallback = Callable[[str, QueryMetrics], None]
# Called with the encoder on every rank, which encodes the same texts; returns metrics by name.
EvaluationFunction = Callable[["TextEncoder"], Mapping[str, float]]


def function_name(function: EvaluationFunction) -> str:
    """The name of its metrics among those of the evaluation sets."""
    return str(getattr(function, "__name__", type(function).__name__))


def _is_metric(item: tuple[Any, Any]) -> bool:
    name, value = item
    return (
        isinstance(name, str)
        and name not in ("step", "set", DATASET)
        and isinstance(value, Real)
        and math.isfinite(value)
    )


class Evaluator:
    """Measures the model in its current state, any number of times, on sets that were read once.

    Similarity is the cosine, as in sentence-transformers and MTEB, even if the model does not normalize; with a
    cross-encoder, it is the model's score of the pair.

    Args:
        encoder: of the live model, or the scorer of a cross-encoder; its prompts are used for sets without their own.
            None measures the order in which the candidates of reranking sets are.
        truncate_dims: the sets are also measured with the first so many dimensions of the vectors, which are encoded
            once; the name of a set is then followed by `@` and the number.
        run_depth: documents per query in run files; does not affect metrics. None: as many as the metrics need, at
            least 1000.
        vector_cache: stores document vectors on disk, so that an interrupted evaluation resumes.
        function: measures the model in a way of its own after all sets; every rank calls it.
        suffix: follows the names of all sets, and `mean`, in the results.
        keep_rankings: documents per query of retrieval sets that `rankings` has after an evaluation.
    """

    def __init__(
        self,
        sets: Sequence[LoadedSet],
        encoder: SentenceEncoder | PairScorer | None,
        world: World,
        *,
        truncate_dims: Sequence[int] = (),
        run_depth: int | None = None,
        index: IndexConfig | None = None,
        vector_cache: VectorCache | None = None,
        function: EvaluationFunction | None = None,
        suffix: str = "",
        keep_rankings: int = 0,
    ) -> None:
        self.sets = [replace(loaded, data=replace(loaded.data, name=loaded.data.name + suffix)) for loaded in sets]
        self.mean = MEAN + suffix
        # By set and query, the indices of the best documents of a search, best first.
        self.rankings: dict[str, dict[str, list[int]]] = {}
        self.seconds: dict[str, float] = {}  # that each set took in the last evaluation
        self.truncate_dims = tuple(truncate_dims)
        self.datasets = _datasets(self.sets, self.truncate_dims, self.mean)  # by set, with `mean` if it is reported
        if function is not None:
            self.datasets[function_name(function)] = DatasetInfo("function", {}, subset=False)
        self.encoder = encoder
        self.world = world
        self.run_depth = run_depth
        self.index = index or IndexConfig()
        self.vector_cache = vector_cache
        self.function = function
        self.keep_rankings = keep_rankings

    def evaluate(
        self,
        *,
        save_runs: Path | None = None,
        progress: ProgressCallback | None = None,
        stop: Callable[[], bool] | None = None,
        on_result: ResultCallback | None = None,
        on_queries: QueryCallback | None = None,
    ) -> dict[str, dict[str, float]]:
        """Metrics by set and name, identical on every rank. A collective.

        The set `mean` holds the means of the metrics that several sets have, over these sets. With `truncate_dims`,
        `SET@256` and `mean@256` are those of vectors with 256 dimensions.

        Raises TrainingError on every rank if a vector is not finite, and DataError for a set that cannot be measured.

        Args:
            save_runs: directory for TREC files of each retrieval and reranking set, which rank 0 writes.
            progress: called with the name of the set before the description.
            stop: called before each set; True, on every rank, raises EvaluationInterrupted.
            on_result: called on every rank after each set, `mean` last; an error on one rank is raised on all. It is no
                collective.
            on_queries: called on every rank after each retrieval and reranking set; no collective.
        """
        results: dict[str, dict[str, float]] = {}
        for loaded in self.sets:
            if stop is not None and stop():
                raise EvaluationInterrupted
            name, started = loaded.data.name, time.monotonic()
            encoded = EncodedSet()
            measured: dict[str, dict[str, float]] = {}
            with explain_lost_contact(f"evaluating {name}"), self._report_progress(name, progress):
                for dimension in (None, *self.truncate_dims):
                    row = _named_at(loaded, dimension)
                    measured[row.data.name] = self._measure(row, dimension, encoded, save_runs, on_queries)
            self.seconds[name] = time.monotonic() - started
            if encoded.ranking is not None:
                self.rankings[name] = encoded.ranking
            results |= measured
            for row_name, metrics in measured.items():
                self._report_result(row_name, metrics, on_result)
        shared = _shared_metrics({loaded.data.name: metric_names_of_set(loaded) for loaded in self.sets}, self.mean)
        for dimension in (None, *self.truncate_dims) if shared else ():
            of_sets = [results[_name_at(loaded.data.name, dimension)] for loaded in self.sets]
            mean = _name_at(self.mean, dimension)
            results[mean] = {}
            for metric in shared:
                values = [metrics[metric] for metrics in of_sets if metric in metrics]
                results[mean][metric] = math.fsum(values) / len(values)
            self._report_result(mean, results[mean], on_result)
        if self.function is not None:
            name = function_name(self.function)
            results[name] = self._call(self.function, name)
            self._report_result(name, results[name], on_result)
        return results

    def speed(self, name: str) -> str:
        """How long a set took in the last evaluation: `2.1 s (2,286 documents/s)`."""
        seconds, counts = self.seconds[name], dict(self.datasets[name].counts)
        unit = "documents" if "documents" in counts else next(iter(counts))
        (data,) = (loaded.data for loaded in self.sets if loaded.data.name == name)
        if isinstance(self.encoder, PairScorer) and isinstance(data, RetrievalSet):
            unit, counts["pairs"] = "pairs", sum(map(len, (data.candidates or {}).values()))
        return f"{format_duration(seconds)} ({counts[unit] / max(seconds, 1e-9):,.0f} {unit}/s)"

    def _call(self, function: EvaluationFunction, name: str) -> dict[str, float]:
        """The metrics of a function of the user: those that rank 0 gets."""
        from embedtrain.evaluation.sentence_transformers import TextEncoder  # takes seconds to import

        assert isinstance(self.encoder, SentenceEncoder), "a function of the user encodes texts"
        with explain_lost_contact(f"evaluating {name}"), TextEncoder(self.encoder, {}, close=lambda: None) as encoder:
            metrics: Any = function(encoder)
        with self.world.fail_together(f"evaluating {name}"):
            if self.world.is_main and not (isinstance(metrics, Mapping) and all(map(_is_metric, metrics.items()))):
                raise ConfigError(f"evaluation.function {name} must return numbers by name, not {metrics!r}")
        return self.world.broadcast({key: float(value) for key, value in metrics.items()} if self.world.is_main else {})

    def _report_result(self, name: str, metrics: Mapping[str, float], on_result: ResultCallback | None) -> None:
        if on_result is not None:
            with self.world.fail_together(f"writing the metrics of {name}"):
                on_result(name, metrics, self.datasets[name])

    def _report_progress(self, name: str, progress: ProgressCallback | None) -> contextlib.AbstractContextManager[None]:
        if progress is None or self.encoder is None:
            return contextlib.nullcontext()
        return self.encoder.report_progress(lambda text, done, total: progress(f"{name}: {text}", done, total))

    def _measure(
        self,
        loaded: LoadedSet,
        dimension: int | None,
        encoded: EncodedSet,
        save_runs: Path | None,
        on_queries: QueryCallback | None,
    ) -> dict[str, float]:
        common: dict[str, Any] = {
            "world": self.world,
            "loaded": loaded,
            "metrics": metric_names_of_set(loaded),
            "save_runs": save_runs,
            "run_depth": self.run_depth,
            "on_queries": None if on_queries is None else functools.partial(on_queries, loaded.data.name),
        }
        if isinstance(self.encoder, SentenceEncoder):
            context = EncoderContext(
                encoder=self.encoder,
                index=self.index,
                vector_cache=self.vector_cache,
                dimension=dimension,
                encoded=encoded,
                keep_ranking=self.keep_rankings if dimension is None else 0,
                **common,
            )
            metrics = _measure_vectors(context)
        elif self.encoder is not None:
            metrics = _measure_scores(ScorerContext(scorer=self.encoder, **common))
        else:
            assert isinstance(loaded.data, RetrievalSet), "only rankings can be measured without a model"
            metrics = measure_first_stage(loaded.data, EvaluationContext(**common))
        return {metric: metrics[metric] for metric in common["metrics"]}


def _measure_vectors(context: EncoderContext) -> dict[str, float]:
    match context.loaded.data:
        case RetrievalSet(candidates=None) as data:
            return measure_retrieval(data, context)
        case RetrievalSet() as data:
            return measure_reranking(data, context)
        case ScoredPairs() as data:
            return measure_sts(data, context)
        case LabelledPairs() as data:
            return measure_pair_classification(data, context)
        case Bitext() as data:
            return measure_bitext(data, context)
        case ClassificationSet() as data:
            return measure_classification(data, context)
        case ClusteringSet() as data:
            return measure_clustering(data, context)


def _measure_scores(context: ScorerContext) -> dict[str, float]:
    match context.loaded.data:
        case RetrievalSet() as data:
            return measure_reranking(data, context)
        case ScoredPairs() as data:
            return measure_sts(data, context)
        case LabelledPairs() as data:
            return measure_pair_classification(data, context)
        case data:
            raise AssertionError(f"{data.name} has no pairs to score")


def metric_names_of_set(loaded: LoadedSet) -> tuple[str, ...]:
    """The metrics of a set, the main one first."""
    return _kind_and_metrics(loaded.data)[1] if loaded.metrics is None else loaded.metrics


def metric_names(sets: Sequence[LoadedSet], truncate_dims: Sequence[int] = ()) -> dict[str, tuple[str, ...]]:
    """The metrics of an evaluation by the name of the set; `mean` has those that several sets have.

    With `truncate_dims` also those of truncated vectors, such as `SET@256`.
    """
    by_set = {loaded.data.name: metric_names_of_set(loaded) for loaded in sets}
    shared = _shared_metrics(by_set, MEAN)
    names = by_set | {MEAN: shared} if shared else by_set
    return {_name_at(name, dimension): of_set for name, of_set in names.items() for dimension in (None, *truncate_dims)}


def _named_at(loaded: LoadedSet, dimension: int | None) -> LoadedSet:
    """The set with the name that its row has, which is also that of its files."""
    return replace(loaded, data=replace(loaded.data, name=_name_at(loaded.data.name, dimension)))


def _name_at(name: str, dimension: int | None) -> str:
    """The name of a set whose vectors have so many dimensions."""
    return name if dimension is None else f"{name}@{dimension}"


def _datasets(sets: Sequence[LoadedSet], truncate_dims: Sequence[int], mean: str) -> dict[str, DatasetInfo]:
    infos = {loaded.data.name: dataset_info(loaded) for loaded in sets}
    shared = set(_shared_metrics({loaded.data.name: metric_names_of_set(loaded) for loaded in sets}, mean))
    of_mean = [infos[loaded.data.name] for loaded in sets if shared & set(metric_names_of_set(loaded))]
    infos |= {mean: DatasetInfo.of_mean(of_mean)} if of_mean else {}
    return {
        _name_at(name, dimension): replace(info, dimension=dimension)
        for name, info in infos.items()
        for dimension in (None, *truncate_dims)
    }


def check_metrics(data: EvaluationData, metrics: Sequence[str], option: str) -> None:
    """Raise ConfigError for metrics that a set does not have; `option` is the name of the option for the message."""
    kind, allowed = _kind_and_metrics(data)
    if not metrics:
        raise ConfigError(f"{option}=[] is empty: name metrics, or write null for those of {kind}")
    if isinstance(data, RetrievalSet):
        check_retrieval_metrics(metrics, option)
        return
    for metric in metrics:
        if metric not in allowed:
            raise ConfigError(f"{option}: {metric!r} is not a metric of {kind}: allowed are {', '.join(allowed)}")


def has_metric(data: EvaluationData, metric: str) -> bool:
    """Whether a set has a metric."""
    try:
        check_metrics(data, [metric], "")
    except ConfigError:
        return False
    return True


def _kind_and_metrics(data: EvaluationData) -> tuple[str, tuple[str, ...]]:
    """The name of a kind of set, and its metrics, the main one first."""
    match data:
        case RetrievalSet(candidates=None):
            return "retrieval", RETRIEVAL_METRICS
        case RetrievalSet():
            return "reranking", RERANKING_METRICS
        case ScoredPairs():
            return "semantic textual similarity", STS_METRICS
        case LabelledPairs():
            return "pair classification", PAIR_CLASSIFICATION_METRICS
        case Bitext():
            return "bitext mining", BITEXT_METRICS
        case ClassificationSet():
            return "classification", classification_metrics(data)
        case ClusteringSet():
            return "clustering", CLUSTERING_METRICS


def _shared_metrics(metrics_by_set: Mapping[str, Sequence[str]], mean: str) -> tuple[str, ...]:
    """The metrics that several sets have; none if a set has the name `mean` itself."""
    if mean in metrics_by_set:
        return ()
    counts = Counter(metric for metrics in metrics_by_set.values() for metric in metrics)
    return tuple(metric for metric, count in counts.items() if count > 1)
