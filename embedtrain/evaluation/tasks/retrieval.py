"""Retrieval: every query's best documents out of all, measured as trec_eval does."""

from embedtrain.evaluation.metrics import RETRIEVAL_METRICS, required_depth
from embedtrain.evaluation.tasks.measuring import EvaluationContext
from embedtrain.evaluation.tasks.rankings import ranking_metrics
from embedtrain.evaluation.types import RetrievalSet

METRICS = RETRIEVAL_METRICS


def measure(data: RetrievalSet, measuring: EvaluationContext) -> dict[str, float]:
    """Figures of a retrieval set, the same floats on every rank. A collective."""
    judged, ids = data.judged_queries, data.documents.ids
    vectors = measuring.queries([data.queries[query] for query in judged])
    index = measuring.indexed(data.documents.texts, ids)
    depth = required_depth(measuring.metrics)
    most = max(measuring.run_depth if measuring.save_runs else 0, depth)
    # One more: the query itself may be among them.
    ranking = index.search(vectors, most + data.ignore_identical_ids)

    def found(number: int) -> dict[str, float]:
        places, scores = ranking.documents[number].tolist(), ranking.scores[number].tolist()
        run = {ids[place]: score for place, score in zip(places, scores, strict=True)}
        if data.ignore_identical_ids:
            run.pop(judged[number], None)
        return run

    return ranking_metrics(data, found, depth, measuring)
