"""The global order: what an epoch holds, and that batch k depends on nothing but the seed and k."""

from collections import Counter

import numpy as np
import pytest

from embedtrain.data.order import BatchPlan
from embedtrain.errors import ConfigError


def epoch(plan: BatchPlan, number: int) -> list[np.ndarray]:
    first = number * plan.steps_per_epoch
    return [plan.indices(k) for k in range(first, first + plan.steps_per_epoch)]


def test_every_row_once_an_epoch_and_the_last_batch_smaller() -> None:
    plan = BatchPlan([70, 33], [1.0, 1.0], 16, seed=1)
    assert plan.steps_per_epoch == 7
    orders = []
    for number in range(3):
        batches = epoch(plan, number)
        assert [len(batch) for batch in batches] == [16] * 6 + [7]
        assert all(batch.dtype == np.int64 for batch in batches)
        orders.append(np.concatenate(batches).tolist())
        assert sorted(orders[-1]) == list(range(103))
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_batch_is_the_same_however_it_is_reached() -> None:
    sizes, weights = [40, 25], [1.0, 1.5]
    forward = [BatchPlan(sizes, weights, 8, seed=3).indices(k) for k in range(40)]
    plan = BatchPlan(sizes, weights, 8, seed=3)
    for k in (39, 0, 17, 16, 38, 1, 20):
        assert np.array_equal(plan.indices(k), forward[k])
        plan.indices(k)[:] = -1  # a caller's change is its own
        assert np.array_equal(plan.indices(k), forward[k])
    assert not np.array_equal(BatchPlan(sizes, weights, 8, seed=4).indices(0), forward[0])


def test_the_order_is_pinned() -> None:
    """Another order would make a resumed run see rows twice: change it only knowing that."""
    assert BatchPlan([5, 3], [1.0, 2.0], 11, seed=42).indices(0).tolist() == [7, 6, 3, 5, 4, 5, 1, 6, 2, 7, 0]


def test_weights() -> None:
    plan = BatchPlan([100, 100, 101, 10], [0.5, 2.0, 1.5, 0.0], 64, seed=5)
    assert plan.rows_per_epoch == 50 + 200 + 152
    assert plan.steps_per_epoch == 7
    parts = []
    for number in range(4):
        counts = Counter(np.concatenate(epoch(plan, number)).tolist())
        assert sum(counts.values()) == plan.rows_per_epoch
        half = {row for row in range(100) if counts[row]}
        assert len(half) == 50
        assert all(counts[row] == 1 for row in half)
        assert all(counts[row] == 2 for row in range(100, 200))
        assert Counter(counts[row] for row in range(200, 301)) == {1: 50, 2: 51}
        assert not any(counts[row] for row in range(301, 311))
        parts.append(half)
    assert len({frozenset(part) for part in parts}) == 4


def test_sources_are_mixed_evenly_and_copies_lie_apart() -> None:
    plan = BatchPlan([2000, 2000], [2.0, 1.0], 100, seed=6)
    batches = epoch(plan, 0)
    shares = [float(np.mean(batch < 2000)) for batch in batches]
    assert min(shares) > 0.45
    assert max(shares) < 0.85
    meetings = sum(len(batch) - len(set(batch.tolist())) for batch in batches)
    assert meetings <= 5  # a plain permutation lets some 33 pairs meet


def test_total_steps() -> None:
    plan = BatchPlan([100], [1.0], 10, seed=0)
    assert plan.total_steps(7, None) == 7
    assert plan.total_steps(None, 1) == 10
    assert plan.total_steps(None, 1.1) == 11  # 1.1 * 10 is 11.000000000000002
    assert plan.total_steps(None, 1.11) == 12
    assert plan.total_steps(None, 0.01) == 1
    for steps, epochs in ((None, None), (3, 1.0), (0, None), (None, 0.0), (None, -1.0)):
        with pytest.raises(ConfigError, match=r"train\.steps"):
            plan.total_steps(steps, epochs)


def test_what_cannot_be_planned() -> None:
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="weight"):
            BatchPlan([3], [weight], 2, seed=0)
    with pytest.raises(ConfigError, match="global_batch_size=0"):
        BatchPlan([3], [1.0], 0, seed=0)
    with pytest.raises(ConfigError, match="no rows"):
        BatchPlan([3], [0.0], 2, seed=0)
