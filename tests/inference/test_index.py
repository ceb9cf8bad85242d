"""Exact search over shards against a plain one in exact arithmetic."""

import contextlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from embedtrain.config.evaluation import IndexConfig, VectorDtype, VectorPlacement
from embedtrain.config.losses import VectorSimilarity
from embedtrain.inference import index as index_module
from embedtrain.inference import store
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, first_added_order, trec_order
from embedtrain.inference.store import dtype_of
from embedtrain.inference.vectors import vector_score
from embedtrain.losses.encoded import Part


def exact_score(query, document, similarity):
    pairs = [(Fraction(a), Fraction(b)) for a, b in zip(query, document, strict=True)]
    if similarity == "euclidean":
        return -math.sqrt(sum((a - b) ** 2 for a, b in pairs))
    if similarity == "manhattan":
        return -float(sum(abs(a - b) for a, b in pairs))
    return float(sum(a * b for a, b in pairs))


def exact_ranking(queries, documents, ids, k, similarity="cosine"):
    """The definition: exact scores rounded to float32, sorted by score and id, descending."""
    rankings = []
    for query in queries.tolist():
        scored = []
        for number, document in enumerate(documents.tolist()):
            score = exact_score(query, document, similarity)
            scored.append((float(np.float32(score)) + 0.0, ids[number], number))
        scored.sort(reverse=True)
        rankings.append([(score, number) for score, _, number in scored[:k]])
    return rankings


@contextlib.contextmanager
def sizes_of(**sizes):
    """Set constants of the modules for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(store if name == "TILE" else index_module, name, size)
        yield


def search_sharded(world, queries, documents, ids, k, sizes=None, all_on=None, similarity="cosine"):
    """Documents distributed over the ranks, or all on the rank `all_on`."""
    rows = list(range(world.rank, len(ids), world.size)) if all_on is None else []
    rows = list(range(len(ids)))[::-1] if all_on == world.rank else rows
    with sizes_of(**(sizes or {})):
        index = ShardedIndex(trec_order(ids), world, score=vector_score(VectorSimilarity(similarity)))
        for batch in torch.tensor(rows, dtype=torch.int64).split(5):
            index.add(EncodedShard(Part(documents[batch]), batch))
        ranking = index.search(queries, k)
    return rows_of(ranking.scores, ranking.documents)


def rows_of(scores, documents):
    pairs = zip(scores.tolist(), documents.tolist(), strict=True)
    return [list(zip(row_scores, row_documents, strict=True)) for row_scores, row_documents in pairs]


def vectors(seed, rows, dimensions=24):
    return unit_vectors(torch.randn(rows, dimensions, generator=torch.Generator().manual_seed(seed)))


def check(ranks, queries, documents, ids, k, world_sizes=(1, 2, 3), sizes=None, all_on=None, similarity="cosine"):
    expected = exact_ranking(queries, documents, ids, k, similarity)
    for world_size in world_sizes:
        for result in ranks(world_size, search_sharded, queries, documents, ids, k, sizes, all_on, similarity):
            assert result == expected


def numbered(n):
    return [f"d{i}" for i in range(n)]


@pytest.mark.parametrize("k", [1, 4, 11, 100])
def test_uneven_counts(ranks, k):
    check(ranks, vectors(1, 7), vectors(2, 11), numbered(11), k)


def test_fewer_documents_than_ranks(ranks):
    check(ranks, vectors(1, 3), vectors(2, 2), numbered(2), 5, world_sizes=(3,))


@pytest.mark.parametrize("rank", [0, 2])
def test_all_documents_on_one_rank(ranks, rank):
    check(ranks, vectors(1, 3), vectors(2, 9), numbered(9), 4, world_sizes=(3,), all_on=rank)


def test_ties_are_ordered_by_descending_id(ranks):
    documents = vectors(2, 5)[torch.tensor([0, 1, 1, 2, 1, 0, 3, 4, 1, 0, 1])]
    ids = ["10", "9", "a", "é", "B", "", "ab", "2", "100", "z", "中"]
    check(ranks, vectors(1, 7), documents, ids, 6)


def test_negative_and_zero_scores(ranks):
    documents = torch.cat([-vectors(2, 6), torch.zeros(2, 24), -torch.zeros(1, 24), vectors(3, 2) * 1e-30])
    check(ranks, vectors(1, 4), documents, numbered(11), 11)


def test_more_ties_at_the_cutoff_than_extra_candidates(ranks):
    documents = vectors(2, 2)[torch.arange(240) % 2]
    check(ranks, vectors(1, 5), documents, [f"{i * 37 % 241}" for i in range(240)], 10, world_sizes=(1, 2))


def test_scores_closer_than_the_rounding_error_of_a_tile(ranks):
    """A model may give all texts nearly the same vector."""
    documents = unit_vectors(vectors(2, 1) + 3e-8 * vectors(3, 300))
    check(ranks, vectors(2, 2), documents, numbered(300), 20, world_sizes=(1, 3))


@pytest.mark.parametrize("similarity", ["dot", "euclidean", "manhattan"])
def test_similarities_of_vectors_that_are_not_normalised(ranks, similarity):
    """Ties, equal vectors, and distances that differ by less than the rounding of a tile."""
    far = vectors(2, 40) * torch.logspace(-2, 2, 40)[:, None]
    close = far[3] + 3e-7 * vectors(3, 60)
    documents = torch.cat([far, far[:20], close])
    queries = torch.cat([vectors(1, 3) * 5, far[3:5]])
    sizes = {"TILE": 23, "QUERY_BATCH_SIZE": 2}
    check(ranks, queries, documents, numbered(120), 9, world_sizes=(1, 3), sizes=sizes, similarity=similarity)
    check(ranks, queries, documents, numbered(120), 9, world_sizes=(2,), all_on=1, similarity=similarity)


def count_above(world, queries, documents, limits, similarity):
    index = ShardedIndex(first_added_order(len(documents)), world, score=vector_score(VectorSimilarity(similarity)))
    rows = torch.arange(world.rank, len(documents), world.size)
    index.add(EncodedShard(Part(documents[rows]), rows))
    return index.count_above(queries, limits).tolist()


@pytest.mark.parametrize("similarity", ["euclidean", "manhattan"])
def test_documents_that_are_nearer(ranks, similarity):
    documents, queries = vectors(2, 50).repeat(2, 1) * 3, vectors(1, 4) * 2
    scores = [
        [exact_score(query, document, similarity) for document in documents.tolist()] for query in queries.tolist()
    ]
    limits = torch.tensor([row[i] for i, row in enumerate(scores)])
    expected = [
        sum(np.float32(score) > limit for score in row) for row, limit in zip(scores, limits.numpy(), strict=True)
    ]
    for result in ranks(2, count_above, queries, documents, limits, similarity):
        assert result == expected


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_scores_are_those_of_sentence_transformers(name):
    from sentence_transformers.util import SimilarityFunction

    first, second = vectors(1, 9) * 3, vectors(2, 9) * torch.linspace(0.1, 4, 9)[:, None]
    score = vector_score(VectorSimilarity(name))
    pairwise = SimilarityFunction.to_similarity_pairwise_fn(name)(first, second)
    torch.testing.assert_close(score.exact(Part(first), Part(second)), pairwise)
    store = score.store(IndexConfig(), torch.device("cpu"), 9)
    store.add(Part(score.search_rows(second)))
    queries = Part(score.search_rows(first))
    every = SimilarityFunction.to_similarity_fn(name)(first, second)
    ((_, tile),) = store.tiles()
    torch.testing.assert_close(tile.scores(queries), every)
    rows, columns = torch.cartesian_prod(torch.arange(9), torch.arange(9)).unbind(1)
    torch.testing.assert_close(store.exact_scores(queries, rows, columns).view(9, 9), every)


def test_tiles(ranks):
    check(
        ranks,
        vectors(1, 7),
        vectors(2, 90),
        numbered(90),
        8,
        world_sizes=(1, 2),
        sizes={"TILE": 7, "QUERY_BATCH_SIZE": 3},
    )
    close = unit_vectors(vectors(2, 1) + 3e-8 * vectors(3, 90))
    check(ranks, vectors(1, 7), close, numbered(90), 8, world_sizes=(1, 2), sizes={"TILE": 7, "QUERY_BATCH_SIZE": 3})


def test_vectors_that_are_not_normalised(ranks):
    check(
        ranks,
        vectors(1, 5) * 40,
        vectors(2, 60) * torch.logspace(-3, 3, 60)[:, None],
        numbered(60),
        9,
        world_sizes=(2,),
    )


def search_in_low_precision(world, queries, documents, ids):
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            result = search_sharded(world, queries, documents, ids, 3)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    return result


def test_the_callers_autocast_is_ignored(ranks):
    queries, documents, ids = vectors(1, 7), vectors(2, 200), numbered(200)
    assert ranks(1, search_in_low_precision, queries, documents, ids)[0] == exact_ranking(queries, documents, ids, 3)


def search_and_rescore(world, queries, documents, ids, k, config, queries_per_scan):
    """Rankings, and the scores of the ranked documents and of none computed one by one."""
    with sizes_of(TILE=7, QUERIES_PER_SCAN=queries_per_scan, QUERY_BATCH_SIZE=2):
        index = ShardedIndex(trec_order(ids), world, config)
        for batch in torch.arange(len(ids))[world.rank :: world.size].split(4):
            index.add(EncodedShard(Part(documents[batch]), batch))
        ranking = index.search(queries, k)
        padded = torch.cat([ranking.documents, torch.full((len(queries), 1), -1)], dim=1)
        return ranking.scores, ranking.documents, index.scores_of(queries, padded)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", list(VectorDtype))
def test_vectors_on_the_host_in_each_type(ranks, size, dtype):
    """Scores are those of the vectors in that data type, in fp32, in any batches."""
    queries, documents, ids = vectors(1, 9), vectors(2, 47)[torch.arange(50) % 47], numbered(50)
    config = IndexConfig(dtype=dtype, place=VectorPlacement.host)
    expected = exact_ranking(queries, documents.to(dtype_of(config)).float(), ids, 6)
    for scores, actual, rescored in ranks(size, search_and_rescore, queries, documents, ids, 6, config, 4):
        assert rows_of(scores, actual) == expected
        assert rescored[:, :-1].equal(scores)
        assert rescored[:, -1].eq(-torch.inf).all()


def test_rescoring_with_fewer_documents_than_ranks(ranks):
    results = ranks(3, search_and_rescore, vectors(1, 2), vectors(2, 1), ["d"], 6, IndexConfig(), 2)
    assert all(actual.tolist() == [[0], [0]] for _, actual, _ in results)
    assert all(rescored[:, :-1].equal(scores) for scores, _, rescored in results)


def test_no_queries(ranks):
    assert ranks(2, search_sharded, vectors(1, 0), vectors(2, 4), numbered(4), 3) == [[], []]
