"""Metrics of rankings and of similarities, computed by trec_eval and scipy."""

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import numpy as np
import pytrec_eval
from numpy.typing import NDArray

from embedtrain.config.evaluation import is_label
from embedtrain.config.kinds import kinds
from embedtrain.errors import ConfigError

RETRIEVAL_METRICS = ("ndcg@10", "mrr@10", "map@100", "recall@10", "recall@100", "ndcg@3")
RERANKING_METRICS = ("map", "mrr@10", "ndcg@10")
STS_METRICS = ("spearman", "pearson")
PAIR_CLASSIFICATION_METRICS = ("ap", "accuracy", "f1", "precision", "recall", "accuracy_threshold", "f1_threshold")
BITEXT_METRICS = ("f1", "precision", "recall", "accuracy", "accuracy_back", "accuracy_mean")
CLASSIFICATION_METRICS = ("accuracy", "f1", "f1_weighted", "precision", "recall")
BINARY_CLASSIFICATION_METRICS = (*CLASSIFICATION_METRICS, "ap")
CENTROID_METRICS = ("accuracy", "accuracy@5", *CLASSIFICATION_METRICS[1:])
CLUSTERING_METRICS = ("v_measure", "v_measure_std", "ami")
# trec_eval's names of the families, written as `ndcg@10` (of the first 10 documents) or `ndcg` (of the whole ranking).
_CUTOFF_METRICS = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P", "hit": "success"}
_UNCUT_METRICS = {"ndcg": "ndcg", "map": "map", "mrr": "recip_rank"}
_OWN_METRICS = ("mrr", "hole")  # trec_eval has no cutoff for the first, and does not have the second
# The name under which means over several sets are reported.
MEAN = "mean"
# Depth of rankings for metrics without a cutoff, and of run files: that of trec_eval's own runs.
UNCUT_DEPTH = 1000
_MAX_CUTOFF_DIGITS = 9  # trec_eval's cutoffs are C integers

Run = Mapping[str, Mapping[str, float]]


def retrieval_metrics(
    judgements: Mapping[str, Mapping[str, int]], run: Run, metrics: Sequence[str] = RETRIEVAL_METRICS
) -> dict[str, float]:
    """Means over all queries that have judgements; a query that is missing in the run counts as 0.

    By query id, `judgements` has the gain of each judged document, and `run` the scores of the best documents, at least
    `required_depth(metrics)` if there are as many.
    """
    return mean_metrics(metrics_per_query(judgements, run, metrics, judged_documents(judgements)), metrics)


def metrics_per_query(
    judgements: Mapping[str, Mapping[str, int]], run: Run, metrics: Sequence[str], judged: Set[str]
) -> NDArray[np.float64]:
    """Metrics of each query that has judgements, in their order: float64 [Q, M]; arguments as in `retrieval_metrics`.

    `hole@k` is the fraction of the first k documents that are not in `judged`, those judged for any query, as in MTEB.
    """
    gains_by_query = {query: dict(gains) for query, gains in judgements.items() if gains}
    parsed = [_parse_metric(metric) for metric in metrics]
    trec_names = {
        _UNCUT_METRICS[family] if k is None or family == "mrr" else f"{_CUTOFF_METRICS[family]}.{k}"
        for family, k in parsed
        if family != "hole"
    }
    # Without a relevant document all of these metrics are 0. trec_eval does not return for such a query: it counts the
    # judgements of each gain in memory that it has not cleared (`ndcg`, pytrec-eval-terrier 0.5.11).
    relevant = {query: gains for query, gains in gains_by_query.items() if max(gains.values()) > 0}
    by_query: dict[str, Mapping[str, float]] = defaultdict(lambda: defaultdict(float))
    if relevant:
        evaluator = pytrec_eval.RelevanceEvaluator(relevant, trec_names)
        by_query |= evaluator.evaluate({query: dict(run.get(query, {})) for query in relevant})
    results = np.empty((len(gains_by_query), len(parsed)))
    for column, (family, k) in enumerate(parsed):
        if family == "hole":
            values = [_hole(run.get(query, {}), judged, k or 1) for query in gains_by_query]
        elif family == "mrr":
            values = [by_query[query]["recip_rank"] for query in gains_by_query]
            # Documents below rank k count as not found.
            values = [value if k is None or value >= 1 / k else 0.0 for value in values]
        else:
            name = _UNCUT_METRICS[family] if k is None else f"{_CUTOFF_METRICS[family]}_{k}"
            values = [by_query[query][name] for query in gains_by_query]
        results[:, column] = values
    return results


def mean_metrics(per_query: NDArray[np.float64], metrics: Sequence[str]) -> dict[str, float]:
    """Means over queries of [Q, M]; 0 without queries. Independent of the order of the queries, bit by bit."""
    columns = zip(metrics, per_query.T.tolist(), strict=True)
    return {metric: math.fsum(values) / max(1, len(values)) for metric, values in columns}


def judged_documents(judgements: Mapping[str, Mapping[str, int]]) -> set[str]:
    """All documents that are judged for any query."""
    return {document for gains in judgements.values() for document in gains}


def required_depth(metrics: Sequence[str]) -> int:
    """The number of documents per query that these metrics need."""
    return max(UNCUT_DEPTH if k is None else k for _, k in map(_parse_metric, metrics))


def check_retrieval_metrics(metrics: Sequence[str], option: str) -> None:
    """Raise ConfigError for an unknown name."""
    families = (*_CUTOFF_METRICS, *_OWN_METRICS)
    for metric in metrics:
        family, _, cutoff = metric.partition("@")
        is_allowed = family in _UNCUT_METRICS
        if cutoff:
            is_number = cutoff.isascii() and cutoff.isdigit() and len(cutoff) <= _MAX_CUTOFF_DIGITS
            is_allowed = family in families and is_number and int(cutoff) > 0
        if not is_allowed:
            allowed = ", ".join([*(f"{name}@K" for name in families), *_UNCUT_METRICS])
            raise ConfigError(
                f"{option}: {metric!r} is not a metric of rankings: allowed are {allowed}, such as ndcg@10"
            )


def _parse_metric(metric: str) -> tuple[str, int | None]:
    family, _, cutoff = metric.partition("@")
    return family, int(cutoff) if cutoff else None


def _hole(scores: Mapping[str, float], judged: Set[str], k: int) -> float:
    top = sorted(scores.items(), key=lambda item: (item[1], item[0]), reverse=True)[:k]
    return sum(document not in judged for document, _ in top) / k


def sts_metrics(cosines: Sequence[float], gold: Sequence[float]) -> dict[str, float]:
    """Rank and linear correlation of similarities with gold scores; 0 where all similarities are equal.

    For a model that gives every text the same vector, scipy returns NaN, which would break comparisons of checkpoints.
    """
    from scipy import stats  # takes half a second, which the start of a training should not wait for

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        metrics = {
            "spearman": float(stats.spearmanr(cosines, gold).statistic),
            "pearson": float(stats.pearsonr(cosines, gold).statistic),
        }
    return {name: value if math.isfinite(value) else 0.0 for name, value in metrics.items()}


def set_of_metric(best: str) -> str:
    """The set of `checkpoint.best_metric`, without the form of its vectors: `dev` of `dev@256/ndcg@10`."""
    name = best.rpartition("/")[0]
    base, _, dimension = name.rpartition("@")
    return base if base and (is_label(dimension) or any(dimension in kind.views for kind in kinds())) else name


def parse_best_metric(best: str, metrics: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Cut `checkpoint.best_metric`, `set/metric`, into the name of a set and a metric.

    `metrics` are those of each set. Raises ConfigError for another set or metric.
    """
    name, _, metric = best.rpartition("/")
    if name == MEAN and name not in metrics:
        raise ConfigError(
            f"checkpoint.best_metric={best}: the mean is over the sets that have a metric in common, and no two of "
            f"{', '.join(metrics) or 'evaluation.sets, which is empty,'} have one"
        )
    if name not in metrics:
        allowed = (
            ", ".join(f"{set_name}/{names[0]}" for set_name, names in metrics.items())
            or "none: evaluation.sets is empty"
        )
        raise ConfigError(f"checkpoint.best_metric={best} must be set/metric with a set of evaluation.sets: {allowed}")
    if metric not in metrics[name]:
        raise ConfigError(
            f"checkpoint.best_metric={best}: {name} has the metrics {', '.join(metrics[name])}, not {metric!r}"
        )
    return name, metric
