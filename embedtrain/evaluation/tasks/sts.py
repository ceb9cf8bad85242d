"""Semantic textual similarity: do cosines order pairs as people do?"""

from embedtrain.evaluation.metrics import sts_metrics
from embedtrain.evaluation.tasks.measuring import EvaluationContext
from embedtrain.evaluation.types import ScoredPairs
from embedtrain.inference.exact import cosines

METRICS = ("spearman", "pearson")


def measure(data: ScoredPairs, measuring: EvaluationContext) -> dict[str, float]:
    """Rank and linear correlation of cosines with gold scores, the same floats on every rank. A collective."""
    vectors = measuring.encode_texts([*data.first, *data.second])
    first, second = vectors[: len(data.first)], vectors[len(data.first) :]
    figures: dict[str, float] = {}
    with measuring.world.fail_together(f"computing the metrics of {data.name}"):
        if measuring.world.is_main:
            # As float32, the cosine of two equal texts is 1 and no neighbour of it: they tie.
            figures = sts_metrics(cosines(first, second).float().tolist(), data.scores)
    return measuring.world.broadcast(figures)
