"""Search over weights of words against inner products in exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.index import ShardedIndex, trec_order
from embedtrain.kinds.sparse import score as sparse
from embedtrain.kinds.sparse.score import WordScore
from embedtrain.losses.encoded import Part

IDS = [f"d{number}" for number in range(23)]


def weights(seed, rows, words=40):
    values = torch.randn(rows, words, generator=torch.Generator().manual_seed(seed)).sub(1.0).clamp(min=0.0)
    values[1] = 0.0  # a text without active words
    values[2] = values[3]  # a tie
    return values


def search(world, k):
    documents, queries = weights(1, len(IDS)), weights(2, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "TILE_DOCUMENTS", 4)
        patch.setattr(sparse, "BLOCK_NUMEL", 200)
        index = ShardedIndex(trec_order(IDS), world, score=WordScore())
        for rows in torch.arange(world.rank, len(IDS), world.size).split(3):
            index.add(EncodedShard(Part(documents[rows]), rows))
        ranking = index.search(queries, k)
    return ranking.scores.tolist(), ranking.documents.tolist()


@pytest.mark.parametrize("world_size", [1, 3])
def test_rankings_are_exact_on_any_number_of_ranks(ranks, world_size):
    expected = []
    for query in weights(2, 5).tolist():
        scores = [
            float(np.float32(float(sum(Fraction(a) * Fraction(b) for a, b in zip(query, row, strict=True)))))
            for row in weights(1, len(IDS)).tolist()
        ]
        order = sorted(range(len(IDS)), key=lambda number: (scores[number], IDS[number]), reverse=True)[:6]
        expected.append(([scores[number] for number in order], order))
    for answer in ranks(world_size, search, 6):
        assert list(zip(*answer, strict=True)) == expected


def test_similarities_of_pairs():
    first, second = weights(1, 7), weights(2, 7)
    expected = (first.double() * second.double()).sum(dim=1).float()
    torch.testing.assert_close(WordScore().exact(Part(first), Part(second)), expected)
