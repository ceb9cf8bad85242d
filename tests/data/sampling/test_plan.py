"""The global order: what an epoch holds, and that batch k depends on nothing but the seed and k."""

import itertools
import time
from collections import Counter

import numpy as np
import pytest

from embedtrain.data.sampling.plan import BatchPlan, PlannedBatch
from embedtrain.errors import ConfigError

BOTH = pytest.mark.parametrize("by_source", [False, True])


def epoch(plan: BatchPlan, number: int) -> list[PlannedBatch]:
    first = number * plan.steps_per_epoch
    return [plan.batch(k) for k in range(first, first + plan.steps_per_epoch)]


def pairs(batches: list[PlannedBatch]) -> list[tuple[int, int]]:
    """The rows of batches, each as its source and its number there."""
    return [pair for batch in batches for pair in zip(batch.sources.tolist(), batch.rows.tolist(), strict=True)]


def same(one: PlannedBatch, other: PlannedBatch) -> bool:
    contents = [(batch.step, batch.source, batch.first_position, pairs([batch])) for batch in (one, other)]
    return contents[0] == contents[1]


@BOTH
def test_every_row_once_an_epoch(by_source: bool) -> None:
    sizes = [70, 33, 1, 0, 16]
    plan = BatchPlan(sizes, sizes, 16, seed=1, by_source=by_source)
    everything = sorted((source, row) for source, size in enumerate(sizes) for row in range(size))
    orders = [pairs(epoch(plan, number)) for number in range(3)]
    assert all(sorted(order) == everything for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(part.dtype == np.int64 for part in (plan.batch(0).sources, plan.batch(0).rows))


@BOTH
def test_sizes_differ_by_one_and_positions_follow(by_source: bool) -> None:
    sizes = [101, 30, 17]
    plan = BatchPlan(sizes, sizes, 16, seed=2, by_source=by_source)
    batches = epoch(plan, 0) + epoch(plan, 1)
    assert plan.steps_per_epoch == (7 + 2 + 2 if by_source else 10)
    for source in range(3) if by_source else [None]:
        lengths = {len(batch.rows) for batch in batches if batch.source == source}
        assert max(lengths) <= 16
        assert max(lengths) - min(lengths) <= 1
    assert [batch.step for batch in batches] == list(range(2 * plan.steps_per_epoch))
    first = 0
    for batch in batches:
        assert batch.first_position == first
        first += len(batch.rows)
    assert first == 2 * plan.rows_per_epoch


@BOTH
def test_a_batch_does_not_depend_on_those_before_it(by_source: bool) -> None:
    def plan(seed: int = 3) -> BatchPlan:
        return BatchPlan([40, 25, 9], [40, 37, 4], 8, seed, by_source=by_source)

    forward = [plan().batch(k) for k in range(40)]
    options = plan()
    for k in (39, 0, 17, 16, 38, 1, 20):
        assert same(options.batch(k), forward[k])
        options.batch(k).rows[:] = -1  # a caller's change is its own
        assert same(options.batch(k), forward[k])
    assert pairs([plan(4).batch(0)]) != pairs([forward[0]])


def test_the_order_is_pinned() -> None:
    """Another order would make a resumed run see rows twice: change it only knowing that."""
    mixed = BatchPlan([5, 3], [5, 6], 11, seed=42).batch(0)
    assert mixed.sources.tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1]
    assert mixed.rows.tolist() == [1, 0, 2, 2, 4, 3, 2, 0, 0, 1, 1]
    by_source = BatchPlan([20, 3], [10, 6], 4, seed=42, by_source=True)
    assert [(batch.source, batch.rows.tolist()) for batch in epoch(by_source, 1)] == [
        (0, [19, 9, 7, 14]),
        (1, [2, 1, 0]),
        (0, [18, 6, 8]),
        (0, [3, 1, 4]),
        (1, [1, 0, 2]),
    ]


@BOTH
def test_rows_in_part_and_several_times(by_source: bool) -> None:
    """Every row once before any is seen twice, over the ends of epochs."""
    sizes, counts = [100, 50, 101, 7, 3], [50, 100, 152, 5, 31]
    plan = BatchPlan(sizes, counts, 64, seed=5, by_source=by_source)
    seen: Counter[tuple[int, int]] = Counter()
    orders = []
    for number in range(4):
        order = pairs(epoch(plan, number))
        assert Counter(source for source, _ in order) == dict(enumerate(counts))
        seen.update(order)
        for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            times = [seen[source, row] for row in range(size)]
            whole, part = divmod((number + 1) * count, size)
            assert Counter(times) == Counter({whole: size - part, whole + 1: part}) - Counter()
        orders.append({row for source, row in order if source == 0})
    assert not orders[0] & orders[1]  # the other half
    assert orders[0] | orders[1] == set(range(100))
    assert orders[0] != orders[2]


@BOTH
def test_no_row_twice_in_a_batch(by_source: bool) -> None:
    sizes = [500, 300, 41]
    plan = BatchPlan(sizes, sizes, 128, seed=6, by_source=by_source)
    for batch in epoch(plan, 0) + epoch(plan, 1):
        assert len(set(pairs([batch]))) == len(batch.rows)
    twice = BatchPlan([2000, 2000], [4000, 2000], 100, seed=6, by_source=by_source)
    meetings = [len(batch.rows) - len(set(pairs([batch]))) for batch in epoch(twice, 0)]
    assert sum(count > 0 for count in meetings) <= 1  # where the second pass begins


def test_mixed_batches_have_sources_in_proportion() -> None:
    counts = np.array([20_000, 9_000, 700, 31, 3])
    plan = BatchPlan([20_000, 3_000, 1_000, 31, 3], counts.tolist(), 256, seed=7)
    held = []
    for batch in epoch(plan, 0):
        assert batch.source is None
        number = np.bincount(batch.sources, minlength=5)
        assert (np.abs(number - counts / counts.sum() * len(batch.rows)) < 2).all()
        held.append(batch.sources)
    for source in (0, 1):
        # Sources are mixed within a batch as well: ranks take every so-manieth row.
        positions = np.concatenate([np.flatnonzero(sources == source) / len(sources) for sources in held])
        assert np.abs(np.histogram(positions, 8, (0, 1))[0] / len(positions) - 1 / 8).max() < 0.02


def test_batches_by_source_are_interleaved() -> None:
    counts = [3000, 1000, 10, 500]
    plan = BatchPlan(counts, counts, 50, seed=8, by_source=True)
    assert plan.steps_per_epoch == 60 + 20 + 1 + 10
    for number in range(2):
        batches = epoch(plan, number)
        assert all((batch.sources == batch.source).all() for batch in batches)
        order = [batch.source for batch in batches]
        assert Counter(order) == {0: 60, 1: 20, 2: 1, 3: 10}
        for start in range(81):
            tenth = order[start : start + 10]
            assert abs(tenth.count(0) - 6.6) < 2
            assert abs(tenth.count(1) - 2.2) < 2
    assert [b.source for b in epoch(plan, 0)] != [b.source for b in epoch(plan, 1)]


def test_batches_by_source_with_rows_of_all_sources() -> None:
    sizes, share = [900, 301, 40, 7], 0.25
    plan = BatchPlan(sizes, sizes, 64, seed=8, by_source=True, mixed_share=share)
    everything = sorted((source, row) for source, size in enumerate(sizes) for row in range(size))
    for number in range(2):
        batches = epoch(plan, number)
        assert sorted(pairs(batches)) == everything
        first = number * sum(sizes)
        for batch in batches:
            assert batch.source is None
            assert batch.first_position == first
            first += len(batch.rows)
            assert len(batch.rows) <= 64
            assert np.bincount(batch.sources).max() >= len(batch.rows) - round(share * 64)
        others = [int((batch.sources != 0).sum()) for batch in batches if (batch.sources == 0).sum() > 32]
        assert min(others) >= 2
        assert max(others) - min(others) <= 3
    assert pairs(epoch(plan, 0)) != pairs(epoch(plan, 1))
    assert same(plan.batch(5), BatchPlan(sizes, sizes, 64, seed=8, by_source=True, mixed_share=share).batch(5))


def test_rows_of_a_source_meet_others_each_epoch() -> None:
    plan = BatchPlan([64], [64], 32, seed=9)
    batches = [set(plan.batch(2 * number).rows.tolist()) for number in range(20)]
    overlaps = [len(one & other) for one, other in itertools.combinations(batches, 2)]
    assert 15 < np.mean(overlaps) < 17
    assert max(overlaps) < 28


@BOTH
def test_tiny_sources_and_a_batch_larger_than_the_epoch(by_source: bool) -> None:
    plan = BatchPlan([1, 2, 1], [1, 2, 1], 1000, seed=1, by_source=by_source)
    assert plan.steps_per_epoch == (3 if by_source else 1)
    assert sorted(pairs(epoch(plan, 5))) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    one = BatchPlan([1], [3], 2, seed=1, by_source=by_source)
    assert [batch.rows.tolist() for batch in epoch(one, 0)] == [[0, 0], [0]]


@BOTH
def test_a_plan_of_any_size_is_created_at_once(by_source: bool) -> None:
    began = time.process_time()
    large = BatchPlan([10**9, 10**6], [10**9, 10**6], 1024, seed=1, by_source=by_source)
    batches = [large.batch(k) for k in (0, 1, large.steps_per_epoch - 1, large.steps_per_epoch, 10**9)]
    sizes = np.random.default_rng(0).integers(1, 2000, 10_000).tolist()
    many = BatchPlan(sizes, sizes, 1024, seed=1, by_source=by_source)
    batches += [many.batch(k) for k in (0, 5000, 10**6)]
    assert time.process_time() - began < 1.0  # 0.05 s
    assert all(0 < len(batch.rows) <= 1024 for batch in batches)
    assert len(set(pairs(batches[:2]))) == len(batches[0].rows) + len(batches[1].rows)


def test_total_steps() -> None:
    plan = BatchPlan([100], [100], 10, seed=0)
    assert plan.total_steps(7, None) == 7
    assert plan.total_steps(None, 1) == 10
    assert plan.total_steps(None, 1.1) == 11  # 1.1 * 10 is 11.000000000000002
    assert plan.total_steps(None, 1.11) == 12
    assert plan.total_steps(None, 0.01) == 1
    for steps, epochs in ((None, None), (3, 1.0), (0, None), (None, 0.0), (None, -1.0)):
        with pytest.raises(ConfigError, match=r"train\.steps"):
            plan.total_steps(steps, epochs)


def test_invalid_options() -> None:
    with pytest.raises(ConfigError, match="global_batch_size=0"):
        BatchPlan([3], [3], 0, seed=0)
    with pytest.raises(ConfigError, match="no rows"):
        BatchPlan([0], [0], 2, seed=0)
    with pytest.raises(ConfigError, match="too long"):
        BatchPlan([3], [2**41], 2, seed=0)
