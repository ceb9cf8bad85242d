"""Dealing texts to ranks and cutting them: all ranks alike, hardly any padding, never over the budget."""

import gzip
import itertools
import json
import time

import numpy as np
import pytest

from embedtrain.data.chunks import ChunkPlan, FurtherCosts, plan_chunks
from tests.conftest import ROOT


def log_normal(number: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(4.4, 0.7, number), 4, 512).astype(np.int64)


def questions_and_passages(number: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    questions, passages = random.lognormal(2.3, 0.4, number), random.lognormal(4.6, 0.5, number)
    return np.where(random.random(number) < 0.2, questions, passages).clip(3, 512).astype(np.int64)


def quickstart(number: int) -> np.ndarray:
    """Of the texts that the quickstart trains on, at a token for four letters."""
    with gzip.open(ROOT / "recipes" / "quickstart" / "train-en.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(row) for row in itertools.islice(file, number)]
    texts = [text for row in rows for text in (row["query"], *row["pos"], *row["neg"])]
    return np.array([2 + len(text) // 4 for text in texts[:number]])


def padded(dealt: ChunkPlan, lengths: np.ndarray) -> np.ndarray:
    """Tokens of each chunk of each rank, padding included: int64 [chunks, ranks]."""
    ranks = [dealt.chunks_of_rank(rank) for rank in range(dealt.texts.shape[1])]
    assert {len(chunks) for chunks in ranks} == {dealt.num_chunks}
    return np.array([[len(c) * max(1, lengths[c].max(initial=0)) for c in chunks] for chunks in ranks]).T


def texts_of(dealt: ChunkPlan, rank: int) -> np.ndarray:
    """All texts of one rank in the order of its chunks."""
    return np.concatenate([np.empty(0, dtype=np.int64), *dealt.chunks_of_rank(rank)])


def checked(lengths: np.ndarray, size: int, chunk_tokens: int, pass_overhead_tokens: int) -> ChunkPlan:
    """A deal that keeps what every deal must."""
    lengths = np.asarray(lengths)
    dealt = plan_chunks(lengths, size, chunk_tokens, pass_overhead_tokens)
    all_texts = np.concatenate([texts_of(dealt, rank) for rank in range(size)])
    assert sorted(all_texts.tolist()) == list(range(len(lengths)))
    numbers = [len(texts_of(dealt, rank)) for rank in range(size)]
    assert max(numbers) - min(numbers) <= 1
    for rank in range(size):
        chunks, texts = dealt.chunks_of_rank(rank), texts_of(dealt, rank)
        assert [len(chunk) > 0 for chunk in chunks[:-1]] == [True] * (dealt.num_chunks - 1) or not chunks
        assert (np.diff(lengths[texts]) <= 0).all()
        assert all(len(c) <= 1 or len(c) * lengths[c].max() <= chunk_tokens for c in chunks)
        assert (dealt.encoder_rank[texts] == rank).all()
    return dealt


def cost(longest: np.ndarray, bounds: tuple[int, ...], chunk_tokens: int, pass_overhead_tokens: int) -> float:
    total = 0
    for start, stop in itertools.pairwise(bounds):
        tokens = (stop - start) * longest[start]
        if stop - start > 1 and tokens > chunk_tokens:
            return float("inf")
        total += int(tokens) + pass_overhead_tokens
    return total


@pytest.mark.parametrize("size", [1, 3])
def test_the_cut_is_optimal(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(40):
        number = int(random.integers(1, 9))
        lengths = random.integers(1, 30, number * size)
        chunk_tokens, pass_overhead_tokens = int(random.integers(20, 150)), int(random.integers(0, 40))
        dealt = checked(lengths, size, chunk_tokens, pass_overhead_tokens)
        longest = np.sort(lengths)[::-1][::size]
        ways = [
            (0, *inner, number) for count in range(number) for inner in itertools.combinations(range(1, number), count)
        ]
        best = min(cost(longest, way, chunk_tokens, pass_overhead_tokens) for way in ways)
        assert cost(longest, dealt.bounds, chunk_tokens, pass_overhead_tokens) == best


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("lengths", [log_normal(4000), questions_and_passages(4000), quickstart(3000)])
def test_ranks_have_equal_work_and_little_padding(lengths: np.ndarray, size: int) -> None:
    dealt = checked(lengths, size, 16384, 64)
    tokens = padded(dealt, lengths)
    assert tokens.sum(axis=0).max() <= 1.01 * tokens.sum(axis=0).mean()
    # Ranks wait for each other in every chunk, so the largest of each is what the step takes.
    assert tokens.max(axis=1).sum() <= 1.01 * tokens.sum(axis=0).mean()
    assert 1 - lengths.sum() / tokens.sum() < (0.02 if size == 1 else 0.06)  # of a few hundred texts a rank
    real = np.array([lengths[texts_of(dealt, rank)].sum() for rank in range(size)])
    assert real.max() <= 1.01 * real.mean()


def test_many_texts_of_several_ranks_pad_little() -> None:
    for lengths in (log_normal(40_000), questions_and_passages(40_000)):
        tokens = padded(checked(lengths, 8, 16384, 64), lengths)
        assert 1 - lengths.sum() / tokens.sum() < 0.01
        assert tokens.max(axis=1).sum() <= 1.001 * tokens.sum(axis=0).mean()


def test_expensive_passes_make_few_chunks() -> None:
    lengths = questions_and_passages(2000)
    numbers = [checked(lengths, 4, 10**9, price).num_chunks for price in (0, 64, 1024, 16384, 10**9)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 1


def test_equal_lengths() -> None:
    dealt = checked(np.full(1000, 50), 4, 1000, 64)
    assert dealt.num_chunks == 13  # 250 groups, 20 in a chunk
    assert padded(dealt, np.full(1000, 50)).sum() == 50_000
    assert checked(np.full(40_000, 50), 4, 1000, 64).num_chunks == 500
    assert checked(np.full(40_000, 50), 4, 3000, 64).num_chunks == 167  # 60 in a chunk


def test_heavy_tails_and_texts_over_the_budget() -> None:
    lengths = np.clip(np.random.default_rng(1).pareto(1.1, 3000) * 10, 0, 30_000).astype(np.int64)
    checked(lengths, 8, 4096, 64)
    dealt = checked(np.array([*[10] * 100, 100_000]), 4, 1000, 64)
    assert padded(dealt, np.array([*[10] * 100, 100_000])).max(axis=1).tolist() == [100_000, 250]
    # Whoever had the long text has the shorter ones of the next chunk.
    steps = np.array([1000, 10, 10, 9, 8, 7])
    assert [chunk.tolist() for chunk in plan_chunks(steps, 2, 1000, 0).chunks_of_rank(0)] == [[0], [3], [5]]


def test_few_texts_or_none() -> None:
    nothing = checked(np.empty(0, dtype=np.int64), 3, 100, 64)
    assert nothing.num_chunks == 0
    assert nothing.chunks_of_rank(2) == []
    assert nothing.encoder_rank.tolist() == []
    few = checked(np.array([5, 9]), 4, 100, 64)
    assert few.num_chunks == 1
    assert [[chunk.tolist() for chunk in few.chunks_of_rank(rank)] for rank in range(4)] == [[[1]], [[0]], [[]], [[]]]
    empty = checked(np.zeros(10, dtype=np.int64), 3, 100, 64)
    assert empty.num_chunks == 1
    last = checked(np.array([90, 90, 1]), 2, 90, 0)
    assert last.num_chunks == 2
    assert sorted(len(last.chunks_of_rank(rank)[1]) for rank in range(2)) == [0, 1]


def test_one_rank() -> None:
    lengths = [3, 50, 7, 50, 8]
    for pass_overhead_tokens, expected in ((3, [[1, 3], [4, 2], [0]]), (20, [[1, 3], [4, 2, 0]])):
        assert [
            chunk.tolist() for chunk in plan_chunks(lengths, 1, 100, pass_overhead_tokens).chunks_of_rank(0)
        ] == expected


def test_time() -> None:
    for number, bound in ((10**5, 0.3), (10**6, 1.5)):  # 0.02 s and 0.2 s
        lengths = log_normal(number)
        for size in (1, 8):
            began = time.process_time()
            plan_chunks(lengths, size, 16384, 256)
            assert time.process_time() - began < bound


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk_tokens", [64, 2048, 16384, 10**9])
def test_packed_texts_are_cut_into_few_chunks_alike_on_all_ranks(size: int, chunk_tokens: int) -> None:
    for lengths in (questions_and_passages(2000), log_normal(17), np.array([5]), np.array([], dtype=np.int64)):
        dealt = plan_chunks(lengths, size, chunk_tokens, 32, packed=True)
        ranks = [dealt.chunks_of_rank(rank) for rank in range(size)]
        assert sorted(np.concatenate([texts_of(dealt, rank) for rank in range(size)]).tolist()) == [
            *range(len(lengths))
        ]
        tokens = np.array([[lengths[chunk].sum() for chunk in chunks] for chunks in ranks]).T.reshape(-1, size)
        assert all(tokens[i, r] <= chunk_tokens or len(ranks[r][i]) == 1 for i, r in np.ndindex(tokens.shape))
        assert dealt.max_tokens_per_chunk(lengths, packed=True) == tokens.max(axis=1, initial=0).tolist()
        assert all((np.diff(lengths[texts_of(dealt, rank)]) <= 0).all() for rank in range(size))
        if len(lengths) == 2000 and chunk_tokens >= 2048:
            # Groups count as their longest text: hardly more than an equal part.
            assert dealt.num_chunks <= -(-int(1.02 * lengths.sum()) // (size * chunk_tokens)) + 1
            assert tokens.sum(axis=0).max() <= 1.01 * tokens.sum(axis=0).mean()
            assert tokens[:-1].min(initial=10**9) >= 0.7 * min(
                chunk_tokens, tokens.sum(axis=0).mean() / dealt.num_chunks
            )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_further_costs_have_maxima_of_their_own(size: int, packed: bool) -> None:
    random = np.random.default_rng(size)
    for number in (1, 5, 40, 3000):
        lengths = random.integers(1, 30, number)
        costs = np.where(random.random((number, 1)) < 0.4, random.integers(0, 9, (number, 2)), 0)
        further = FurtherCosts(costs, (20, 15))
        dealt = plan_chunks(lengths, size, 100, 10, packed=packed, further=further)
        ranks = [dealt.chunks_of_rank(rank) for rank in range(size)]
        assert sorted(np.concatenate([np.concatenate(chunks) for chunks in ranks]).tolist()) == list(range(number))
        for chunk in [chunk for chunks in ranks for chunk in chunks if len(chunk) > 1]:
            assert (costs[chunk].sum(axis=0) <= further.limits).all()
            assert (lengths[chunk].sum() if packed else lengths[chunk].max() * len(chunk)) <= 100
        # Whether a chunk has further costs is the same on all ranks, but for one.
        have_any = [[bool(costs[chunk].any()) for chunk in chunks] for chunks in ranks]
        assert sum(len(set(of_chunk)) > 1 for of_chunk in zip(*have_any, strict=True)) <= 1
        assert all(of_rank == sorted(of_rank, reverse=True) for of_rank in have_any)
        none = plan_chunks(lengths, size, 100, 10, packed=packed, further=FurtherCosts(0 * costs, (20, 15)))
        plain = plan_chunks(lengths, size, 100, 10, packed=packed)
        assert (none.texts == plain.texts).all() and none.bounds == plain.bounds
