"""What a reranker changes, query by query: the difference to its first stage, with a confidence interval."""

from collections.abc import Iterator, Mapping

import numpy as np

from embedtrain.evaluate.stages import RERANKED
from embedtrain.tracking.query_metrics import QueryMetrics
from embedtrain.tracking.report.bootstrap import CONFIDENCE, interval


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
        yield (
            f"{name.removesuffix(RERANKED)}: the reranker changes {metric} by {differences.mean():+.4f} "
            f"({CONFIDENCE:.0%} interval {low:+.4f} to {high:+.4f}, {len(differences):,} queries)"
        )
