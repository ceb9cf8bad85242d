"""A score of two functions, as a new kind of model defines it: losses on any number of ranks and search are exact."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorPlacement
from embedtrain.config.losses import DistillScoresConfig, Implementation, InfoNCEConfig
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.exact import pairwise_dot
from embedtrain.inference.index import ShardedIndex, trec_order
from embedtrain.kinds.matrix_score import MatrixScore
from embedtrain.losses.build import build_loss
from embedtrain.losses.encoded import Encoded, Part
from tests.losses.global_batch import distributions
from tests.losses.token_vectors import TokenBatch, token_batch

TEXTS, DOCUMENTS = 4, 11


class LargerProduct(MatrixScore):
    """Of the first vectors of two texts, and of their second ones."""

    name, kind = "larger_product", "halves"

    def matrix(self, anchors: Part, candidates: Part) -> Tensor:
        products = [anchors.values[half::2] @ candidates.values[half::2].T for half in range(2)]
        return torch.maximum(*products)

    def exact(self, first: Part, second: Part) -> Tensor:
        return torch.maximum(*(pairwise_dot(first.values[n::2], second.values[n::2]) for n in range(2))).float().cpu()


def halves(number: int, seed: int, width: int = 6) -> Part:
    values = torch.randn(2 * number, width, generator=torch.Generator().manual_seed(seed))
    return Part(values, np.full(number, 2))


def two_vectors() -> TokenBatch:
    return token_batch(query_rows=(2,) * 5, candidate_rows=(2,) * 9)


CONFIGS = [
    *(InfoNCEConfig(temperature=0.3, learn_temperature=True, implementation=way) for way in list(Implementation)[1:]),
    InfoNCEConfig(temperature=0.3, in_batch_negatives=False),
    DistillScoresConfig(temperature=0.5),
]


def run(world: World, rows_of_rank: list[list[int]]) -> list[tuple[float, Tensor, Tensor]]:
    """The local loss of each configuration, and its gradients at the rows of this rank's texts."""
    results = []
    for config in CONFIGS:
        loss = build_loss(config, dimension=6, seed=0, score=LargerProduct()).double()
        queries, documents, info = two_vectors().of_rank(world.rank, rows_of_rank, torch.float64)
        output = loss(Encoded((queries,)), Encoded((documents,)), info)
        output.local_loss.backward()
        results.append((output.local_loss.item(), queries.values.grad, documents.values.grad))
    return results


def formula(config: InfoNCEConfig | DistillScoresConfig, batch: TokenBatch) -> Tensor:
    halves_of = [(batch.queries[n::2], batch.candidates[n::2]) for n in range(2)]
    scores = torch.maximum(*(queries @ documents.T for queries, documents in halves_of))
    temperature = config.temperature
    if isinstance(config, InfoNCEConfig) and config.learn_temperature:  # the parameter starts in float32
        temperature = 1 / torch.tensor([1 / temperature], dtype=torch.float64).log().float().double().exp().item()
    terms = []
    for row, first in enumerate(batch.first):
        own, logits = batch.documents_of([row]), scores[row] / temperature
        if isinstance(config, DistillScoresConfig):
            target = torch.tensor(batch.labels, dtype=torch.float64)[own].softmax(dim=0)
            terms.append((target * (target.log() - logits[own].log_softmax(dim=0))).sum())
            continue
        answers = {
            batch.document_keys[batch.first[other]]
            for other, key in enumerate(batch.query_keys)
            if key == batch.query_keys[row]
        }
        compared = range(len(logits)) if config.in_batch_negatives else own
        kept = [index for index in compared if index == first or batch.document_keys[index] not in answers]
        terms.append(logits[kept].logsumexp(dim=0) - logits[first])
    several = sum(number > 1 for number in batch.documents)
    return torch.stack(terms).sum() / (several if isinstance(config, DistillScoresConfig) else len(terms))


@pytest.mark.parametrize("number", [0, 1, 2, 6])
def test_losses(ranks, number):
    rows_of_rank, batch = distributions(5)[number], two_vectors()
    answers = ranks(len(rows_of_rank), run, rows_of_rank)
    for config, *of_ranks in zip(CONFIGS, *answers, strict=True):
        leaves = [rows.clone().requires_grad_() for rows in (batch.queries, batch.candidates)]
        expected = formula(config, replace(batch, queries=leaves[0], candidates=leaves[1]))
        expected.backward()
        assert sum(answer[0] for answer in of_ranks) == pytest.approx(expected.item(), rel=1e-10)
        for rows, (_, query_grads, document_grads) in zip(rows_of_rank, of_ranks, strict=True):
            for leaf, texts, grads in (
                (leaves[0], rows, query_grads),
                (leaves[1], batch.documents_of(rows), document_grads),
            ):
                right = leaf.grad.view(-1, 2, leaf.shape[1])[texts].flatten(0, 1)
                torch.testing.assert_close(grads, right, rtol=1e-10, atol=1e-10)


def search(world: World) -> tuple[list[list[int]], Tensor]:
    documents = halves(DOCUMENTS, 2)
    index = ShardedIndex(trec_order([f"{n:02}" for n in range(DOCUMENTS)]), world, score=LargerProduct())
    rows = torch.arange(DOCUMENTS)[world.rank :: world.size]
    local = documents.take(rows, rows.numpy())
    index.add(EncodedShard(local, rows))
    ranking = index.search(halves(TEXTS, 1), 5)
    assert index.scores_of(halves(TEXTS, 1), ranking.documents).equal(ranking.scores)
    return ranking.documents.tolist(), ranking.scores


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_search_equals_exact_arithmetic(ranks, world_size):
    queries, documents = halves(TEXTS, 1), halves(DOCUMENTS, 2)

    def score(query: Part, document: Part) -> Fraction:
        rows = zip(query.values.tolist(), document.values.tolist(), strict=True)
        return max(sum(Fraction(a) * Fraction(b) for a, b in zip(*pair, strict=True)) for pair in rows)

    scores = [
        [score(queries.slice(t, t + 1), documents.slice(n, n + 1)) for n in range(DOCUMENTS)] for t in range(TEXTS)
    ]
    best = [sorted(range(DOCUMENTS), key=lambda n, row=row: row[n], reverse=True)[:5] for row in scores]
    expected = torch.tensor([[float(scores[t][n]) for n in best[t]] for t in range(TEXTS)])
    for found, values in ranks(world_size, search):
        assert found == best
        torch.testing.assert_close(values, expected, rtol=1e-7, atol=0)


def test_vectors_are_kept_in_memory():
    with pytest.raises(ConfigError, match=r"index\.place=disk: .*halves"):
        LargerProduct().store(IndexConfig(place=VectorPlacement.disk), torch.device("cpu"), 1)
