"""Figures from rankings and from similarities; trec_eval and scipy compute them."""

import math
import warnings
from collections.abc import Mapping, Sequence

import pytrec_eval
from scipy import stats

from embedtrain.errors import ConfigError

# Our names, as BEIR and MTEB write them, and trec_eval's. The field's main figure comes first, as it is told.
_TREC_NAMES = {
    "ndcg@10": "ndcg_cut_10",
    "mrr@10": "recip_rank",
    "map@100": "map_cut_100",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
    "ndcg@3": "ndcg_cut_3",
}
_MEASURES = {"ndcg_cut.3,10", "recip_rank", "map_cut.100", "recall.10,100"}

RETRIEVAL_METRICS = tuple(_TREC_NAMES)
STS_METRICS = ("spearman", "pearson")
# How deep a ranking must go for all of these figures.
DEPTH = 100

Run = Mapping[str, Mapping[str, float]]


def retrieval_metrics(judgements: Mapping[str, Mapping[str, int]], run: Run) -> dict[str, float]:
    """Mean figures over all queries that have judgements; one that is missing in the run counts as 0.

    Args:
        judgements: by query id the gain of each judged document.
        run: by query id the score of each document found; at least `DEPTH` documents where there are as many.
    """
    judged = {query: dict(gains) for query, gains in judgements.items() if gains}
    evaluator = pytrec_eval.RelevanceEvaluator(judged, _MEASURES)
    each = evaluator.evaluate({query: dict(run.get(query, {})) for query in judged})
    figures: dict[str, float] = {}
    for name, trec_name in _TREC_NAMES.items():
        values = [each[query][trec_name] for query in judged]
        if name == "mrr@10":  # trec_eval knows no cut here: what was found below rank 10 counts as not found
            values = [value if value >= 1 / 10 else 0.0 for value in values]
        figures[name] = math.fsum(values) / max(1, len(values))
    return figures


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


def split_best(best: str, metrics: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Cut `checkpoint.best` into the name of a set and a metric.

    Args:
        best: `set/metric`.
        metrics: which metrics each evaluation set has.

    Raises:
        ConfigError: there is no such set, or it has no such metric.
    """
    name, _, metric = best.rpartition("/")
    if name not in metrics:
        known = ", ".join(f"{known}/{metrics[known][0]}" for known in metrics) or "none: evaluation.sets is empty"
        raise ConfigError(f"checkpoint.best={best} must be set/metric with a set of evaluation.sets: {known}")
    if metric not in metrics[name]:
        raise ConfigError(f"checkpoint.best={best}: {name} has the metrics {', '.join(metrics[name])}, not {metric!r}")
    return name, metric
