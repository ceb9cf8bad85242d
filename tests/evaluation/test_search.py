"""Exact search over shards against a plain one in exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from embedtrain.config.evaluation import IndexConfig, VectorDtype, VectorPlacement
from embedtrain.inference import index as search
from embedtrain.inference import index as tiles
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, trec_order


def exact_ranking(queries, documents, ids, k):
    """The definition: exact inner product rounded to float32, then score and id downwards."""
    rankings = []
    for query in queries.tolist():
        scored = []
        for place, document in enumerate(documents.tolist()):
            score = sum(Fraction(a) * Fraction(b) for a, b in zip(query, document, strict=True))
            scored.append((float(np.float32(float(score))), ids[place], place))
        scored.sort(reverse=True)
        rankings.append([(score, place) for score, _, place in scored[:k]])
    return rankings


def search_sharded(world, queries, documents, ids, k, tile=None, queries_tile=None, share=None):
    """Documents dealt out to the ranks, or all to the rank `share`."""
    rows = list(range(world.rank, len(ids), world.size)) if share is None else []
    rows = list(range(len(ids)))[::-1] if share == world.rank else rows
    before = tiles.TILE, search.QUERY_BATCH_SIZE
    tiles.TILE, search.QUERY_BATCH_SIZE = tile or before[0], queries_tile or before[1]
    try:
        index = ShardedIndex(trec_order(ids), world)
        for some in torch.tensor(rows, dtype=torch.int64).split(5):
            index.add(EncodedShard(documents[some], some))
        ranking = index.search(queries, k)
    finally:
        tiles.TILE, search.QUERY_BATCH_SIZE = before
    return [
        list(zip(scores, places, strict=True))
        for scores, places in zip(ranking.scores.tolist(), ranking.documents.tolist(), strict=True)
    ]


def vectors(seed, rows, dimensions=24):
    return unit_vectors(torch.randn(rows, dimensions, generator=torch.Generator().manual_seed(seed)))


def check(ranks, queries, documents, ids, k, sizes=(1, 2, 3), **options):
    expected = exact_ranking(queries, documents, ids, k)
    for size in sizes:
        for result in ranks(size, search_sharded, queries, documents, ids, k, *options.values()):
            assert result == expected


def numbered(n):
    return [f"d{i}" for i in range(n)]


@pytest.mark.parametrize("k", [1, 4, 11, 100])
def test_uneven_counts(ranks, k):
    check(ranks, vectors(1, 7), vectors(2, 11), numbered(11), k)


def test_fewer_documents_than_ranks(ranks):
    check(ranks, vectors(1, 3), vectors(2, 2), numbered(2), 5, sizes=(3,))


@pytest.mark.parametrize("share", [0, 2])
def test_all_documents_on_one_rank(ranks, share):
    check(ranks, vectors(1, 3), vectors(2, 9), numbered(9), 4, sizes=(3,), tile=None, queries_tile=None, share=share)


def test_ties_are_ordered_by_id_downwards(ranks):
    documents = vectors(2, 5)[torch.tensor([0, 1, 1, 2, 1, 0, 3, 4, 1, 0, 1])]
    ids = ["10", "9", "a", "é", "B", "", "ab", "2", "100", "z", "中"]
    check(ranks, vectors(1, 7), documents, ids, 6)


def test_negative_and_zero_scores(ranks):
    documents = torch.cat([-vectors(2, 6), torch.zeros(2, 24), -torch.zeros(1, 24), vectors(3, 2) * 1e-30])
    check(ranks, vectors(1, 4), documents, numbered(11), 11)


def test_more_ties_at_the_cut_than_slack(ranks):
    documents = vectors(2, 2)[torch.arange(240) % 2]
    check(ranks, vectors(1, 5), documents, [f"{i * 37 % 241}" for i in range(240)], 10, sizes=(1, 2))


def test_scores_closer_than_the_rounding_of_a_tile(ranks):
    """As of a model that gives all texts nearly the same vector."""
    documents = unit_vectors(vectors(2, 1) + 3e-8 * vectors(3, 300))
    check(ranks, vectors(2, 2), documents, numbered(300), 20, sizes=(1, 3))


def test_tiles(ranks):
    check(ranks, vectors(1, 7), vectors(2, 90), numbered(90), 8, sizes=(1, 2), tile=7, queries_tile=3)
    close = unit_vectors(vectors(2, 1) + 3e-8 * vectors(3, 90))
    check(ranks, vectors(1, 7), close, numbered(90), 8, sizes=(1, 2), tile=7, queries_tile=3)


def test_vectors_that_are_not_normalised(ranks):
    check(ranks, vectors(1, 5) * 40, vectors(2, 60) * torch.logspace(-3, 3, 60)[:, None], numbered(60), 9, sizes=(2,))


def search_in_low_precision(world, queries, documents, ids):
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            result = search_sharded(world, queries, documents, ids, 3)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    return result


def test_a_callers_autocast_changes_nothing(ranks):
    queries, documents, ids = vectors(1, 7), vectors(2, 200), numbered(200)
    assert ranks(1, search_in_low_precision, queries, documents, ids)[0] == exact_ranking(queries, documents, ids, 3)


def kept_otherwise(world, queries, documents, ids, k, config, visit):
    """Vectors kept as `config` says, `visit` queries at a time; all rankings, this rank's, and scores one by one."""
    before = tiles.TILE, search.QUERIES_PER_SCAN, search.QUERY_BATCH_SIZE
    tiles.TILE, search.QUERIES_PER_SCAN, search.QUERY_BATCH_SIZE = 7, visit, 2
    try:
        index = ShardedIndex(trec_order(ids), world, config)
        mine = torch.arange(len(ids))[world.rank :: world.size]
        for some in mine.split(4):
            index.add(EncodedShard(documents[some], some))
        ranking = index.search(queries, k)
        share, own = index.search_mine(queries[:visit], k)
        asked = torch.cat([ranking.documents, torch.full((len(queries), 1), -1)], dim=1)
        return ranking.scores, ranking.documents, list(share), own.documents, index.scores_of(queries, asked)
    finally:
        tiles.TILE, search.QUERIES_PER_SCAN, search.QUERY_BATCH_SIZE = before


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", list(VectorDtype))
def test_vectors_on_the_host_in_passes_as_fp32_or_bf16(ranks, size, dtype):
    """Scores are those of the vectors as they are kept, in fp32, whatever is searched at a time."""
    queries, documents, ids = vectors(1, 9), vectors(2, 47)[torch.arange(50) % 47], numbered(50)
    stored = documents if dtype is VectorDtype.fp32 else documents.bfloat16().float()
    expected = exact_ranking(queries, stored, ids, 6)
    results = ranks(
        size, kept_otherwise, queries, documents, ids, 6, IndexConfig(dtype=dtype, place=VectorPlacement.host), 4
    )
    for scores, places, _, _, again in results:
        assert [list(zip(*row, strict=True)) for row in zip(scores.tolist(), places.tolist(), strict=True)] == expected
        assert again[:, :-1].equal(scores)
        assert again[:, -1].eq(-torch.inf).all()
    assert [row for result in results for row in result[2]] == [0, 1, 2, 3], "each query's results on one rank"
    assert torch.cat([result[3] for result in results]).equal(results[0][1][:4])


def test_fewer_documents_than_ranks_one_by_one(ranks):
    results = ranks(3, kept_otherwise, vectors(1, 2), vectors(2, 1), ["d"], 6, IndexConfig(), 2)
    assert all(result[1].tolist() == [[0], [0]] for result in results)
    assert all(result[4][:, :-1].equal(result[0]) for result in results)


def test_no_queries(ranks):
    assert ranks(2, search_sharded, vectors(1, 0), vectors(2, 4), numbered(4), 3) == [[], []]
