"""Evaluates a live model on its sets, on all ranks."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.code import load_code
from embedtrain.config.evaluation import IndexConfig, VectorFormat
from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.errors import ConfigError, EvaluationInterrupted
from embedtrain.evaluation.metrics import MEAN
from embedtrain.evaluation.tasks import (
    FIRST_STAGE_RECALL,
    EncodedSet,
    EncoderContext,
    EvaluationContext,
    ScorerContext,
    measure_bitext,
    measure_first_stage,
    measure_pair_classification,
    measure_reranking,
    measure_retrieval,
    measure_sts,
)
from embedtrain.evaluation.types import (
    CHUNKS,
    Bitext,
    ClassificationSet,
    ClusteringSet,
    CompressedVectors,
    LabelledPairs,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
    Variant,
    dataset_info,
    has_variant,
    metric_names_of_set,
    name_at,
    shared_metrics,
    vector_size,
)
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.tracking.metrics import DATASET, DatasetInfo, QueryMetrics, VectorSize
from embedtrain.utils.formatting import format_duration

if TYPE_CHECKING:
    from embedtrain.evaluation.sentence_transformers import TextEncoder

# Called with the encoder on every rank, which encodes the same texts; returns metrics by name.
EvaluationFunction = Callable[["TextEncoder"], Mapping[str, float]]


def load_function(path: str, option: str) -> EvaluationFunction:
    """Import `module:function`. Raises ConfigError if that fails, or if it cannot be called."""
    function: EvaluationFunction = load_code(path, option)
    if not callable(function):
        raise ConfigError(f"{option}={path}: must be a function of an encoder, not {function!r}")
    return function


def function_name(function: EvaluationFunction) -> str:
    """The name of its metrics among those of the evaluation sets."""
    return str(getattr(function, "__name__", type(function).__name__))


def check_function_name(function: EvaluationFunction, names: Collection[str], option: str) -> None:
    """Raise ConfigError if an evaluation set has the name of the function."""
    if function_name(function) in names:
        raise ConfigError(f"{option}={function_name(function)}: a set to evaluate has its name")


def call_function(function: EvaluationFunction, encoder: SentenceEncoder, world: World) -> dict[str, float]:
    """The metrics that rank 0 gets. A collective. Raises ConfigError if they are no numbers by name."""
    from embedtrain.evaluation.sentence_transformers import TextEncoder  # takes seconds to import

    name = function_name(function)
    with explain_lost_contact(f"evaluating {name}"), TextEncoder(encoder, {}, close=lambda: None) as text_encoder:
        metrics: Any = function(text_encoder)
    with world.fail_together(f"evaluating {name}"):
        if world.is_main and not (isinstance(metrics, Mapping) and all(map(_is_metric, metrics.items()))):
            raise ConfigError(f"the evaluation function {name} must return numbers by name, not {metrics!r}")
    return world.broadcast({key: float(value) for key, value in metrics.items()} if world.is_main else {})


def _is_metric(item: tuple[Any, Any]) -> bool:
    name, value = item
    return (
        isinstance(name, str)
        and name not in ("step", "set", DATASET)
        and isinstance(value, Real)
        and math.isfinite(value)
    )


# Called with the name of a set, its metrics, and what was measured.
ResultCallback = Callable[[str, Mapping[str, float], DatasetInfo], None]
# Called with the name of a set, and the metrics of each of its queries.
QueryCallback = Callable[[str, QueryMetrics], None]


class Evaluator:
    """Measures the model in its current state, any number of times, on sets that were read once.

    Similarity is that of the model's directory, as in sentence-transformers and MTEB: the cosine by default, even if
    the model does not normalize; with a late-interaction model, MaxSim of its vectors; with a cross-encoder, the
    model's score of the pair.

    Args:
        encoder: of the live model, or the scorer of a cross-encoder; its prompts are used for sets without their own.
            None measures the order in which the candidates of reranking sets are.
        truncate_dims: the sets are also measured with the first so many dimensions of the vectors, which are encoded
            once; the name of a set is then followed by `@` and the number.
        compressed: forms of the vectors with which retrieval sets are also measured, without encoding again.
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
        compressed: CompressedVectors | None = None,
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
        views = tuple(encoder.score.views) if isinstance(encoder, SentenceEncoder) else ()
        self.compressed = compressed or CompressedVectors()
        # Of each set, besides the set itself.
        self.variants: tuple[Variant, ...] = (*truncate_dims, *views, *self.compressed.besides(truncate_dims))
        self.encoder = encoder
        self.index = index or IndexConfig()
        self.datasets = self._datasets()  # by set, with `mean` if it is reported
        if function is not None:
            self.datasets[function_name(function)] = DatasetInfo(
                "function", {}, subset=False, precision=None if encoder is None else encoder.precision
            )
        self.world = world
        self.vector_cache = vector_cache
        self.function = function
        self.keep_rankings = keep_rankings

    def evaluate(
        self,
        *,
        save_runs: Path | None = None,
        run_depth: int | None = None,
        progress: ProgressCallback | None = None,
        stop: Callable[[], bool] | None = None,
        on_result: ResultCallback | None = None,
        on_queries: QueryCallback | None = None,
    ) -> dict[str, dict[str, float]]:
        """Metrics by set and name, identical on every rank. A collective.

        The set `mean` holds the means of the metrics that several sets have, over these sets. With `truncate_dims`,
        `SET@256` and `mean@256` are those of vectors with 256 dimensions. A model of three representations has further
        rows, such as `SET@lexical`, besides that of the sum of their scores.

        Raises TrainingError on every rank if a vector is not finite, and DataError for a set that cannot be measured.

        Args:
            save_runs: directory for TREC files of each retrieval and reranking set, which rank 0 writes.
            run_depth: documents per query in these files; None: as many as the metrics need, at least 1000.
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
                for variant in (each for each in (None, *self.variants) if has_variant(loaded, each)):
                    named = _named_at(loaded, variant)
                    measured[named.data.name] = self._measure(
                        EvaluationContext(
                            world=self.world,
                            loaded=named,
                            metrics=metric_names_of_set(named),
                            save_runs=save_runs,
                            run_depth=run_depth,
                            on_queries=None if on_queries is None else functools.partial(on_queries, named.data.name),
                        ),
                        variant,
                        encoded,
                    )
            self.seconds[name] = time.monotonic() - started
            if encoded.ranking is not None:
                self.rankings[name] = encoded.ranking
            results |= measured
            for measured_name, metrics in measured.items():
                self._report_result(measured_name, metrics, on_result)
        for variant in (None, *self.variants):
            measured_sets, shared = self._means_at(variant)
            if not shared:
                continue
            of_sets = [results[name_at(loaded.data.name, variant)] for loaded in measured_sets]
            mean = name_at(self.mean, variant)
            results[mean] = {}
            for metric in shared:
                values = [metrics[metric] for metrics in of_sets if metric in metrics]
                results[mean][metric] = math.fsum(values) / len(values)
            self._report_result(mean, results[mean], on_result)
        if self.function is not None:
            name = function_name(self.function)
            assert isinstance(self.encoder, SentenceEncoder), "a function of the user encodes texts"
            results[name] = call_function(self.function, self.encoder, self.world)
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

    def _means_at(self, variant: Variant) -> tuple[list[LoadedSet], tuple[str, ...]]:
        """The sets that are measured in this form, and the metrics whose means over them are reported."""
        sets = [loaded for loaded in self.sets if has_variant(loaded, variant)]
        return sets, shared_metrics({loaded.data.name: metric_names_of_set(loaded) for loaded in sets}, self.mean)

    def _datasets(self) -> dict[str, DatasetInfo]:
        infos: dict[str, DatasetInfo] = {}
        precision = None if self.encoder is None else self.encoder.precision
        pooling = self.index.token_pooling if isinstance(self.encoder, SentenceEncoder) else 1.0
        for variant in (None, *self.variants):
            sets, shared = self._means_at(variant)
            by_set = {loaded.data.name: dataset_info(loaded) for loaded in sets}
            of_mean = [by_set[loaded.data.name] for loaded in sets if set(shared) & set(metric_names_of_set(loaded))]
            by_set |= {self.mean: DatasetInfo.of_mean(of_mean)} if of_mean else {}
            size = self._vector_size(variant)
            dimension = (
                variant.dims if isinstance(variant, VectorFormat) else variant if isinstance(variant, int) else None
            )
            infos |= {
                name_at(name, variant): replace(
                    info, dimension=dimension, vectors=size, precision=precision, token_pooling=pooling
                )
                for name, info in by_set.items()
            }
        return infos

    def _vector_size(self, variant: Variant) -> VectorSize | None:
        """What a document takes, if several forms of vectors are compared."""
        if not self.compressed.formats or not isinstance(self.encoder, SentenceEncoder):
            return None
        dimension = int(self.encoder.encoder.dimension)  # type: ignore[arg-type]  # of every encoder of vectors
        return vector_size(variant, min(dimension, self.encoder.truncate_dim or dimension))

    def _report_result(self, name: str, metrics: Mapping[str, float], on_result: ResultCallback | None) -> None:
        if on_result is not None:
            with self.world.fail_together(f"writing the metrics of {name}"):
                on_result(name, metrics, self.datasets[name])

    def _report_progress(self, name: str, progress: ProgressCallback | None) -> contextlib.AbstractContextManager[None]:
        if progress is None or self.encoder is None:
            return contextlib.nullcontext()
        return self.encoder.report_progress(lambda text, done, total: progress(f"{name}: {text}", done, total))

    def _measure(self, common: EvaluationContext, variant: Variant, encoded: EncodedSet) -> dict[str, float]:
        """The metrics of one variant of a set. A collective; `encoded` keeps vectors for further ones."""
        if isinstance(self.encoder, SentenceEncoder):
            context = EncoderContext(
                **vars(common),
                encoder=self.encoder,
                index=self.index,
                vector_cache=self.vector_cache,
                variant=variant,
                compressed=self.compressed,
                encoded=encoded,
                keep_ranking=self.keep_rankings if variant is None else 0,
            )
            metrics = _measure_vectors(context)
        elif self.encoder is not None:
            metrics = _measure_scores(ScorerContext(**vars(common), scorer=self.encoder))
        else:
            assert isinstance(common.loaded.data, RetrievalSet), "only rankings can be measured without a model"
            metrics = measure_first_stage(common.loaded.data, common)
        of_index = [name for name in metrics if name.startswith(FIRST_STAGE_RECALL)]
        return {metric: metrics[metric] for metric in (*common.metrics, *of_index)}


def _measure_vectors(context: EncoderContext) -> dict[str, float]:
    match context.loaded.data:
        case RetrievalSet(candidates=None) as data:
            return measure_retrieval(data, context)
        case Bitext() as data:
            return measure_bitext(data, context)
        case ClassificationSet() | ClusteringSet() as data:
            # Imported here because scikit-learn takes a second, which the start of a training should not wait for.
            from embedtrain.evaluation.labels import measure_classification, measure_clustering

            if isinstance(data, ClusteringSet):
                return measure_clustering(data, context)
            return measure_classification(data, context)
        case _:
            return _measure_scores(context)


def _measure_scores(context: EncoderContext | ScorerContext) -> dict[str, float]:
    match context.loaded.data:
        case RetrievalSet() as data:
            return measure_reranking(data, context)
        case ScoredPairs() as data:
            return measure_sts(data, context)
        case LabelledPairs() as data:
            return measure_pair_classification(data, context)
        case data:
            raise AssertionError(f"{data.name} has no pairs to score")


def _named_at(loaded: LoadedSet, variant: Variant) -> LoadedSet:
    """The set with the name that its row has, which is also that of its files."""
    data = loaded.data.of_chunks if variant == CHUNKS and isinstance(loaded.data, RetrievalSet) else loaded.data
    return replace(loaded, data=replace(data, name=name_at(data.name, variant)))
