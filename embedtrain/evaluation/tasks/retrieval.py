"""Retrieval: every query's best documents out of all, measured as trec_eval does."""

from collections.abc import Mapping

from embedtrain.evaluation.metrics import RETRIEVAL_METRICS, depth_of, retrieval_metrics
from embedtrain.evaluation.runfile import qrels_path, run_path, write_qrels, write_run
from embedtrain.evaluation.tasks.measuring import Measuring
from embedtrain.evaluation.types import RetrievalSet

METRICS = RETRIEVAL_METRICS


def measure(data: RetrievalSet, measuring: Measuring) -> dict[str, float]:
    """Figures of a retrieval set, the same floats on every rank. A collective."""
    judged, world = data.judged_queries, measuring.world
    vectors = measuring.queries([data.queries[query] for query in judged])
    index = measuring.indexed(data.documents.texts, data.documents.ids)
    depth = max(measuring.depth if measuring.save_runs else 0, depth_of(measuring.metrics))
    ranking = index.search(vectors, depth + data.ignore_identical_ids)
    figures: dict[str, float] = {}
    with world.together(f"computing the metrics of {data.name}"):
        if world.is_main:
            run: dict[str, Mapping[str, float]] = {}
            for query, places, scores in zip(judged, ranking.documents.tolist(), ranking.scores.tolist(), strict=True):
                found = {data.documents.ids[place]: score for place, score in zip(places, scores, strict=True)}
                if data.ignore_identical_ids:
                    found.pop(query, None)
                run[query] = dict(list(found.items())[:depth])
            figures = retrieval_metrics(data.judgements, run, measuring.metrics)
            if measuring.save_runs is not None:
                write_run(run_path(measuring.save_runs, data.name), run, measuring.depth)
                write_qrels(qrels_path(measuring.save_runs, data.name), data.judgements)
    return world.broadcast(figures)
