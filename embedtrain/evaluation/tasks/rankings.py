"""From rankings to figures: trec_eval's, each rank those of its share of the queries."""

from collections.abc import Callable, Mapping
from itertools import islice

import numpy as np

from embedtrain.evaluation.metrics import judged_documents, mean_metrics, metrics_per_query
from embedtrain.evaluation.runfile import qrels_path, run_path, write_qrels, write_run
from embedtrain.evaluation.tasks.measuring import EvaluationContext
from embedtrain.evaluation.types import RetrievalSet

# Rankings that are dicts of ids at a time: they take ten times the memory of the numbers they are made of.
QUERY_BATCH_SIZE = 512


def ranking_metrics(
    data: RetrievalSet, found: Callable[[int], Mapping[str, float]], depth: int, measuring: EvaluationContext
) -> dict[str, float]:
    """Mean figures over the judged queries, the same floats on every rank. A collective.

    Rank 0 writes the rankings and judgements where `measuring.save_runs` says so.

    Args:
        data: the set.
        found: for the number of a judged query the score of each document found, by id, best first; ties as
            trec_eval orders them. The same on every rank.
        depth: how many of these are measured.
        measuring: which figures, and what they are measured on.
    """
    world, judged, metrics = measuring.world, data.judged_queries, measuring.metrics
    first, end = (len(judged) * rank // world.size for rank in (world.rank, world.rank + 1))
    each = [np.empty((0, len(metrics)))]
    with world.fail_together(f"computing the metrics of {data.name}"):
        known = judged_documents(data.judgements)
        for start in range(first, end, QUERY_BATCH_SIZE):
            some = range(start, min(end, start + QUERY_BATCH_SIZE))
            run = {judged[number]: dict(islice(found(number).items(), depth)) for number in some}
            each.append(metrics_per_query({query: data.judgements[query] for query in run}, run, metrics, known))
        if world.is_main and measuring.save_runs is not None:
            rankings = ((query, found(number)) for number, query in enumerate(judged))
            write_run(run_path(measuring.save_runs, data.name), rankings, measuring.run_depth)
            write_qrels(qrels_path(measuring.save_runs, data.name), data.judgements)
    return mean_metrics(np.concatenate(world.gather(np.concatenate(each))), metrics)
