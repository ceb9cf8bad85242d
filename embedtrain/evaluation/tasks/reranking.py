"""Reranking: every query's own candidates in the order of their cosines, measured as trec_eval does.

Shapes: Q queries, M candidates of the query that has most, D dimensions.
"""

import torch
from torch import Tensor

from embedtrain.evaluation.tasks.measuring import EvaluationContext
from embedtrain.evaluation.tasks.rankings import ranking_metrics
from embedtrain.evaluation.types import RetrievalSet

METRICS = ("map", "mrr@10", "ndcg@10")

# Scores that all ranks exchange at a time.
_SCORES_AT_A_TIME = 1 << 22


def measure(data: RetrievalSet, measuring: EvaluationContext) -> dict[str, float]:
    """Figures of a set with candidates, the same floats on every rank. A collective.

    A candidate that is named twice counts once. Only documents that are candidates of some query are encoded.
    """
    assert data.candidates is not None, "a reranking set has candidates"
    judged = data.judged_queries
    wanted = [list(dict.fromkeys(data.candidates.get(query, ()))) for query in judged]
    numbers = sorted({number for row in wanted for number in row})
    ids = [data.documents.ids[number] for number in numbers]
    vectors = measuring.queries([data.queries[query] for query in judged])
    index = measuring.indexed([data.documents.texts[number] for number in numbers], ids)

    place = {number: at for at, number in enumerate(numbers)}
    width = max([1, *map(len, wanted)])
    # -1 stands where a query has fewer candidates.
    documents = torch.full((len(judged), width), -1, dtype=torch.int64)
    for row, some in enumerate(wanted):
        documents[row, : len(some)] = torch.tensor([place[number] for number in some], dtype=torch.int64)
    block = max(1, _SCORES_AT_A_TIME // width)
    scores = [index.scores_of(*some) for some in zip(vectors.split(block), documents.split(block), strict=True)]
    every = torch.cat([torch.empty((0, width)), *scores])

    def found(number: int) -> dict[str, float]:
        run = _ranked([ids[at] for at in documents[number].tolist() if at >= 0], every[number])
        if data.ignore_identical_ids:
            run.pop(judged[number], None)
        return run

    return ranking_metrics(data, found, width, measuring)


def _ranked(ids: list[str], scores: Tensor) -> dict[str, float]:
    """Scores by id, best first; equal ones by id downwards, as trec_eval orders them."""
    pairs = zip(scores[: len(ids)].tolist(), ids, strict=True)
    return {document: score for score, document in sorted(pairs, reverse=True)}
