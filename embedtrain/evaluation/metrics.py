"""Figures from rankings and from similarities; trec_eval and scipy compute them."""

import math
import warnings
from collections.abc import Mapping, Sequence, Set

import numpy as np
import pytrec_eval
from numpy.typing import NDArray
from scipy import stats

from embedtrain.errors import ConfigError

RETRIEVAL_METRICS = ("ndcg@10", "mrr@10", "map@100", "recall@10", "recall@100", "ndcg@3")
# Families of metrics, written as `ndcg@10` (of the first 10) or `map` (of all that is ranked), and trec_eval's names.
_CUTOFF_METRICS = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P", "hit": "success"}
_UNCUT_METRICS = {"ndcg": "ndcg", "map": "map", "mrr": "recip_rank"}
_OWN_METRICS = ("mrr", "hole")  # trec_eval knows no cut of the first, and does not know the second
# What means over several sets are reported under.
MEAN = "mean"
# How deep a ranking goes at least.
DEFAULT_RUN_DEPTH = 100
# And where a metric looks at all of it: as deep as trec_eval's own runs.
_UNCUT_DEPTH = 1000

Run = Mapping[str, Mapping[str, float]]


def retrieval_metrics(
    judgements: Mapping[str, Mapping[str, int]], run: Run, metrics: Sequence[str] = RETRIEVAL_METRICS
) -> dict[str, float]:
    """Mean figures over all queries that have judgements; one that is missing in the run counts as 0.

    Args:
        judgements: by query id the gain of each judged document.
        run: by query id the score of each document found; as deep as `depth_of(metrics)` where there are as many.
        metrics: which figures.
    """
    return mean_metrics(metrics_per_query(judgements, run, metrics, judged_documents(judgements)), metrics)


def metrics_per_query(
    judgements: Mapping[str, Mapping[str, int]], run: Run, metrics: Sequence[str], known: Set[str]
) -> NDArray[np.float64]:
    """Figures of each query that has judgements, in their order: float64 [Q, M].

    Args:
        judgements: as for `retrieval_metrics`.
        run: as for `retrieval_metrics`.
        metrics: the M figures; `hole@k` is the share of the first k that nobody has judged for any query, as in MTEB.
        known: all documents that somebody has judged.
    """
    judged = {query: dict(gains) for query, gains in judgements.items() if gains}
    cuts = [_parse_metric(metric) for metric in metrics]
    asked = {
        _UNCUT_METRICS[family] if k is None or family == "mrr" else f"{_CUTOFF_METRICS[family]}.{k}"
        for family, k in cuts
        if family != "hole"
    }
    each = pytrec_eval.RelevanceEvaluator(judged, asked).evaluate({query: dict(run.get(query, {})) for query in judged})
    figures = np.empty((len(judged), len(cuts)))
    for column, (family, k) in enumerate(cuts):
        if family == "hole":
            values = [_holes(run.get(query, {}), known, k or 1) for query in judged]
        elif family == "mrr":
            values = [each[query]["recip_rank"] for query in judged]
            # What was found below rank k counts as not found.
            values = [value if k is None or value >= 1 / k else 0.0 for value in values]
        else:
            name = _UNCUT_METRICS[family] if k is None else f"{_CUTOFF_METRICS[family]}_{k}"
            values = [each[query][name] for query in judged]
        figures[:, column] = values
    return figures


def mean_metrics(each: NDArray[np.float64], metrics: Sequence[str]) -> dict[str, float]:
    """Means over queries of figures [Q, M]: the same floats however the queries were dealt to ranks; 0 of none."""
    return {
        metric: math.fsum(values) / max(1, len(values)) for metric, values in zip(metrics, each.T.tolist(), strict=True)
    }


def judged_documents(judgements: Mapping[str, Mapping[str, int]]) -> set[str]:
    """All documents that somebody has judged for any query."""
    return {document for gains in judgements.values() for document in gains}


def required_depth(metrics: Sequence[str]) -> int:
    """How many documents of each query these metrics look at."""
    return max(_UNCUT_DEPTH if k is None else k for _, k in map(_parse_metric, metrics))


def check_retrieval_metrics(metrics: Sequence[str], option: str) -> None:
    """Refuse names of which no metric is known.

    Raises:
        ConfigError: with the option and what is allowed.
    """
    for metric in metrics:
        family, _, cut = metric.partition("@")
        known = family in _UNCUT_METRICS if not cut else family in (*_CUTOFF_METRICS, *_OWN_METRICS) and _is_cutoff(cut)
        if not known:
            allowed = ", ".join(
                [*(f"{name}@K" for name in dict.fromkeys((*_CUTOFF_METRICS, *_OWN_METRICS))), *_UNCUT_METRICS]
            )
            raise ConfigError(f"{option}: {metric!r} is no metric of rankings: allowed are {allowed}, such as ndcg@10")


def _is_cutoff(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _parse_metric(metric: str) -> tuple[str, int | None]:
    family, _, cut = metric.partition("@")
    return family, int(cut) if cut else None


def _holes(found: Mapping[str, float], known: Set[str], k: int) -> float:
    first = sorted(found.items(), key=lambda item: (item[1], item[0]), reverse=True)[:k]
    return sum(document not in known for document, _ in first) / k


def sts_metrics(cosines: Sequence[float], gold: Sequence[float]) -> dict[str, float]:
    """Rank and linear correlation of similarities with gold scores; 0 where all similarities are equal.

    A model that gives every text the same vector has no correlation in scipy's eyes but NaN, which no
    comparison of checkpoints survives; it knows nothing, and so it gets 0.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        figures = {
            "spearman": float(stats.spearmanr(cosines, gold).statistic),
            "pearson": float(stats.pearsonr(cosines, gold).statistic),
        }
    return {name: value if math.isfinite(value) else 0.0 for name, value in figures.items()}


def parse_best_metric(best: str, metrics: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Cut `checkpoint.best_metric` into the name of a set and a metric.

    Args:
        best: `set/metric`.
        metrics: which metrics each evaluation set has.

    Raises:
        ConfigError: there is no such set, or it has no such metric.
    """
    name, _, metric = best.rpartition("/")
    if name == MEAN and name not in metrics:
        raise ConfigError(
            f"checkpoint.best_metric={best}: the mean is over the sets that have a metric in common, and no two of "
            f"{', '.join(metrics) or 'evaluation.sets, which is empty,'} have one"
        )
    if name not in metrics:
        known = ", ".join(f"{known}/{metrics[known][0]}" for known in metrics) or "none: evaluation.sets is empty"
        raise ConfigError(f"checkpoint.best_metric={best} must be set/metric with a set of evaluation.sets: {known}")
    if metric not in metrics[name]:
        raise ConfigError(
            f"checkpoint.best_metric={best}: {name} has the metrics {', '.join(metrics[name])}, not {metric!r}"
        )
    return name, metric
