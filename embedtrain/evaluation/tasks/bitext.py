"""Bitext mining: is a sentence's nearest neighbour in the other language its translation?

Shapes: n pairs, D dimensions.
"""

from collections.abc import Sequence

import torch
from sklearn.metrics import precision_recall_fscore_support
from torch import Tensor

from embedtrain.evaluation.tasks.measuring import EvaluationContext, fitting
from embedtrain.evaluation.types import Bitext
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex

METRICS = ("f1", "precision", "recall", "accuracy", "accuracy_back", "accuracy_mean")


def measure(data: Bitext, measuring: EvaluationContext) -> dict[str, float]:
    """Figures of nearest neighbours by cosine, the same floats on every rank. A collective.

    From the first sentences to the second, a translation is found where the neighbour is of the same row; precision,
    recall and F1 are means over rows as classes, as in MTEB. `accuracy_back`, from the second to the first, and
    `accuracy_mean` of both directions are those of sentence-transformers' TranslationEvaluator, where another row's
    sentence is as good if it is the same. Of equally near sentences the earlier one counts.
    """
    vectors = unit_vectors(measuring.encode_texts([*data.first, *data.second]))
    first, second = vectors[: len(data.first)], vectors[len(data.first) :]
    forth = _nearest(first, second, measuring)
    back = _nearest(second, first, measuring)
    figures: dict[str, float] = {}
    with measuring.world.fail_together(f"computing the metrics of {data.name}"), fitting():
        if measuring.world.is_main:
            rows = range(len(data.first))
            precision, recall, f1, _ = precision_recall_fscore_support(
                rows, forth, average="weighted", zero_division=0.0
            )
            same_back = _same(data.first, back)
            figures = {
                "f1": float(f1),
                "precision": float(precision),
                "recall": float(recall),
                "accuracy": sum(found == row for row, found in zip(rows, forth, strict=True)) / len(rows),
                "accuracy_back": same_back,
                "accuracy_mean": (_same(data.second, forth) + same_back) / 2,
            }
    return measuring.world.broadcast(figures)


def _nearest(queries: Tensor, others: Tensor, measuring: EvaluationContext) -> list[int]:
    """For each of [n, D] the row of [n, D] with the largest inner product. A collective.

    Every rank has all vectors; each searches its share of them.
    """
    world, num = measuring.world, len(others)
    index = ShardedIndex(torch.arange(num - 1, -1, -1), world, measuring.index)
    mine = torch.arange(num)[world.rank :: world.size]
    index.add(EncodedShard(others[mine.to(others.device)], mine))
    nearest: list[int] = index.search(queries, 1).documents.flatten().tolist()
    return nearest


def _same(texts: Sequence[str], found: Sequence[int]) -> float:
    return sum(text == texts[row] for text, row in zip(texts, found, strict=True)) / len(texts)
