"""The evaluation of a live model on its sets, all ranks together."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from embedtrain.config.evaluation import IndexConfig
from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.errors import ConfigError, EvaluationInterrupted
from embedtrain.evaluation.metrics import DEFAULT_RUN_DEPTH, MEAN, check_retrieval_metrics
from embedtrain.evaluation.tasks import (
    bitext,
    classification,
    clustering,
    pair_classification,
    reranking,
    retrieval,
    sts,
)
from embedtrain.evaluation.tasks.measuring import EvaluationContext
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
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.vector_cache import VectorCache


class Evaluator:
    """Measures the model as it is now, as often as asked, on sets that were read once.

    Similarity is the cosine, as in sentence-transformers and MTEB, also where the model does not normalise.

    Args:
        sets: from `load_sets`, the same on every rank.
        encoder: the live model; its prompts hold where a set has none of its own.
        world: the ranks.
        run_depth: documents of each query in a run file. Figures do not depend on it.
        index: how documents' vectors are kept while they are searched.
        vector_cache: where they are kept on disk, so that an evaluation that was stopped goes on.
    """

    def __init__(
        self,
        sets: Sequence[LoadedSet],
        encoder: SentenceEncoder,
        world: World,
        *,
        run_depth: int = DEFAULT_RUN_DEPTH,
        index: IndexConfig | None = None,
        vector_cache: VectorCache | None = None,
    ) -> None:
        self.sets = list(sets)
        self.encoder = encoder
        self.world = world
        self.run_depth = run_depth
        self.index = index or IndexConfig()
        self.vector_cache = vector_cache

    def evaluate(
        self,
        *,
        save_runs: Path | None = None,
        progress: ProgressCallback | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> dict[str, dict[str, float]]:
        """Figures by set and metric, the same floats on every rank. A collective.

        `mean` has the means of the metrics that two sets or more have, over these sets.

        Args:
            save_runs: a folder; the ranking and judgements of each set with queries and documents are written there
                by rank 0 as TREC files.
            progress: called as `SentenceEncoder.progress` is, with the name of the set before what is being encoded.
            stop: asked before each set whether to leave it at that; the same on every rank.

        Raises:
            EvaluationInterrupted: `stop` said so.
            TrainingError: on every rank, if the model gives vectors that are not finite.
            DataError: a set cannot be measured.
        """
        figures: dict[str, dict[str, float]] = {}
        for loaded in self.sets:
            if stop is not None and stop():
                raise EvaluationInterrupted
            with (
                explain_lost_contact(f"evaluating {loaded.data.name}"),
                _progress_prefix(self.encoder, loaded.data.name, progress),
            ):
                figures[loaded.data.name] = self._measure(loaded, save_runs)
        shared = _shared_metrics(metrics_of_each(self.sets))
        if shared:
            values = {metric: [of[metric] for of in figures.values() if metric in of] for metric in shared}
            figures[MEAN] = {metric: math.fsum(each) / len(each) for metric, each in values.items()}
        return figures

    def _measure(self, loaded: LoadedSet, save_runs: Path | None) -> dict[str, float]:
        measuring = EvaluationContext(
            self.encoder,
            self.world,
            loaded,
            metric_names_of_set(loaded),
            self.index,
            self.vector_cache,
            save_runs,
            self.run_depth,
        )
        match loaded.data:
            case RetrievalSet(candidates=None) as data:
                figures = retrieval.measure(data, measuring)
            case RetrievalSet() as data:
                figures = reranking.measure(data, measuring)
            case ScoredPairs() as data:
                figures = sts.measure(data, measuring)
            case LabelledPairs() as data:
                figures = pair_classification.measure(data, measuring)
            case Bitext() as data:
                figures = bitext.measure(data, measuring)
            case ClassificationSet() as data:
                figures = classification.measure(data, measuring)
            case ClusteringSet() as data:
                figures = clustering.measure(data, measuring)
        return {metric: figures[metric] for metric in measuring.metrics}


@contextlib.contextmanager
def _progress_prefix(encoder: SentenceEncoder, name: str, progress: ProgressCallback | None) -> Iterator[None]:
    """Tell of the encoding of one set; afterwards the encoder tells whom it told before."""
    before = encoder.progress
    if progress is not None:
        encoder.progress = lambda what, done, total: progress(f"{name}: {what}", done, total)
    try:
        yield
    finally:
        encoder.progress = before


def metric_names_of_set(loaded: LoadedSet) -> tuple[str, ...]:
    """Which metrics a set is measured by, the main one first."""
    return _kind_and_metrics(loaded.data)[1] if loaded.metrics is None else loaded.metrics


def metrics_of_each(sets: Sequence[LoadedSet]) -> dict[str, tuple[str, ...]]:
    """Which metrics each set has, by the set's name."""
    return {loaded.data.name: metric_names_of_set(loaded) for loaded in sets}


def metric_names(sets: Sequence[LoadedSet]) -> dict[str, tuple[str, ...]]:
    """Which figures an evaluation has: the metrics of each set by its name, and of `mean` those that several have."""
    each = metrics_of_each(sets)
    shared = _shared_metrics(each)
    return each | {MEAN: shared} if shared else each


def check_metrics(data: EvaluationData, metrics: Sequence[str], option: str) -> None:
    """Refuse metrics that a set does not have.

    Args:
        data: the set.
        metrics: what is wanted.
        option: the name of the option that says so.

    Raises:
        ConfigError: with the option, its value and what is allowed.
    """
    kind, allowed = _kind_and_metrics(data)
    if not metrics:
        raise ConfigError(f"{option}=[] asks for nothing: name metrics, or write null for those of {kind}")
    if isinstance(data, RetrievalSet):
        check_retrieval_metrics(metrics, option)
        return
    for metric in metrics:
        if metric not in allowed:
            raise ConfigError(f"{option}: {metric!r} is no metric of {kind}: allowed are {', '.join(allowed)}")


def _kind_and_metrics(data: EvaluationData) -> tuple[str, tuple[str, ...]]:
    """What a kind of set is called, and its metrics, the main one first."""
    match data:
        case RetrievalSet(candidates=None):
            return "retrieval", retrieval.METRICS
        case RetrievalSet():
            return "reranking", reranking.METRICS
        case ScoredPairs():
            return "semantic textual similarity", sts.METRICS
        case LabelledPairs():
            return "pair classification", pair_classification.METRICS
        case Bitext():
            return "bitext mining", bitext.METRICS
        case ClassificationSet():
            return "classification", classification.metrics_of_classes(data)
        case ClusteringSet():
            return "clustering", clustering.METRICS


def _shared_metrics(metrics: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The metrics that several sets have; none where a set is itself called `mean`."""
    if MEAN in metrics:
        return ()
    times = Counter(metric for each in metrics.values() for metric in each)
    return tuple(metric for metric, count in times.items() if count > 1)
