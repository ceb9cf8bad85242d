"""The kinds of evaluation sets: their names, sizes and metrics, and the names of their rows."""

from collections import Counter
from collections.abc import Mapping, Sequence

from embedtrain.config.compressed import VectorFormat
from embedtrain.config.evaluation import SetKind
from embedtrain.config.recipe import ModelKind
from embedtrain.errors import ConfigError
from embedtrain.evaluation.compressed import Row, has_row
from embedtrain.evaluation.metrics import MEAN, RETRIEVAL_METRICS, check_retrieval_metrics
from embedtrain.evaluation.tasks.pairs import BITEXT_METRICS, PAIR_CLASSIFICATION_METRICS, STS_METRICS
from embedtrain.evaluation.tasks.rankings import RERANKING_METRICS
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
from embedtrain.tracking.metrics import DatasetInfo, FirstStage

CLASSIFICATION_METRICS = ("accuracy", "f1", "f1_weighted", "precision", "recall")
BINARY_CLASSIFICATION_METRICS = (*CLASSIFICATION_METRICS, "ap")
CLUSTERING_METRICS = ("v_measure", "v_measure_std", "ami")


def dataset_info(loaded: LoadedSet) -> DatasetInfo:
    """Kind and size of a set. Queries are those with judgements, documents those that are searched or ranked."""
    data, first_stage = loaded.data, None
    if isinstance(data, RetrievalSet) and data.first_stage is not None and loaded.first_stage_metrics is not None:
        main = metric_names_of_set(loaded)[0]
        first_stage = FirstStage(data.first_stage, main, loaded.first_stage_metrics[main])
    return DatasetInfo(kind_of(data).value, _counts(data), loaded.is_subset, first_stage=first_stage)


def kind_of(data: EvaluationData) -> SetKind:
    """The kind of a set, never `auto`."""
    match data:
        case RetrievalSet():
            return SetKind.retrieval if data.candidates is None else SetKind.reranking
        case ScoredPairs():
            return SetKind.sts
        case LabelledPairs():
            return SetKind.pair_classification
        case Bitext():
            return SetKind.bitext
        case ClassificationSet():
            return SetKind.classification
        case ClusteringSet():
            return SetKind.clustering


_PER_TOKEN = {ModelKind.late_interaction: "late-interaction", ModelKind.m3: "BGE-M3"}


def check_sets_of_kind(sets: Sequence[LoadedSet], kind: ModelKind, option: str) -> None:
    """Raise ConfigError for a set that models of this kind, which encode texts, cannot measure."""
    for loaded in sets if kind in _PER_TOKEN else ():
        if isinstance(loaded.data, ClassificationSet | ClusteringSet):
            raise ConfigError(
                f"{option}: {loaded.data.name} is a set of the kind {kind_of(loaded.data).value}, which needs one "
                f"vector per text, and a {_PER_TOKEN[kind]} model computes one per token: leave it out (allowed are "
                "retrieval, reranking, sts, pair_classification and bitext)"
            )


def _counts(data: EvaluationData) -> dict[str, int]:
    match data:
        case RetrievalSet():
            return {"queries": len(data.judged_queries), "documents": len(data.documents)}
        case ScoredPairs() | LabelledPairs() | Bitext():
            return {"pairs": len(data.first)}
        case ClassificationSet():
            return {"texts": len(data.texts), "train_texts": len(data.train_texts)}
        case ClusteringSet():
            return {"texts": len(data.texts)}


def metric_names_of_set(loaded: LoadedSet) -> tuple[str, ...]:
    """The metrics of a set, the main one first."""
    return _kind_and_metrics(loaded.data)[1] if loaded.metrics is None else loaded.metrics


def metric_names(sets: Sequence[LoadedSet], rows: Sequence[Row] = ()) -> dict[str, tuple[str, ...]]:
    """The metrics of an evaluation by the name of the set; `mean` has those that several sets have.

    `rows` are also measured, such as `SET@256` with truncated vectors.
    """
    names: dict[str, tuple[str, ...]] = {}
    for row in (None, *rows):
        measured = [loaded for loaded in sets if has_row(loaded, row)]
        by_set = {loaded.data.name: metric_names_of_set(loaded) for loaded in measured}
        shared = shared_metrics(by_set, MEAN)
        by_set |= {MEAN: shared} if shared else {}
        names |= {name_at(name, row): of_set for name, of_set in by_set.items()}
    return names


def name_at(name: str, row: Row) -> str:
    """The name of a row of a set."""
    return name if row is None else f"{name}@{row.label if isinstance(row, VectorFormat) else row}"


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
            # Average precision is defined for two classes only.
            is_binary = len(set(data.labels)) == 2
            return "classification", BINARY_CLASSIFICATION_METRICS if is_binary else CLASSIFICATION_METRICS
        case ClusteringSet():
            return "clustering", CLUSTERING_METRICS


def shared_metrics(metrics_by_set: Mapping[str, Sequence[str]], mean: str) -> tuple[str, ...]:
    """The metrics that several sets have; none if a set has the name `mean` itself."""
    if mean in metrics_by_set:
        return ()
    counts = Counter(metric for metrics in metrics_by_set.values() for metric in metrics)
    return tuple(metric for metric, count in counts.items() if count > 1)
