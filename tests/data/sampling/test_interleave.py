"""Interleaving: one item after the other, each near its ideal position, every stretch even."""

from fractions import Fraction

import numpy as np
import pytest

from embedtrain.data.sampling.plan import Interleaving


def test_one_item_at_a_time_near_its_ideal_position() -> None:
    """The items of a source stand 1/n of the way apart."""
    random = np.random.default_rng(2)
    for key in range(40):
        counts = random.integers(0, 25, int(random.integers(1, 9)))
        order = Interleaving(counts, key)
        counts_before = [order.before(t) for t in range(order.total + 1)]
        assert not counts_before[0].any()
        assert np.array_equal(counts_before[-1], counts)
        steps = np.diff(np.array(counts_before), axis=0)
        assert (steps.sum(axis=1) == 1).all()
        assert ((steps == 0) | (steps == 1)).all()
        sources = steps.argmax(axis=1)
        for source in np.flatnonzero(counts):
            # Item i within the source stands i/n and a part of 1/n of the way; others shift it by one each at most.
            positions = np.flatnonzero(sources == source)
            ideal = [Fraction(i * order.total, int(counts[source])) for i in range(len(positions))]
            reach = order.total / counts[source] + len(counts)
            assert all(
                -len(counts) <= position - at <= reach for position, at in zip(positions.tolist(), ideal, strict=True)
            )


@pytest.mark.parametrize("counts", [[10**9, 10**9 // 3, 7, 1], [2**40 - 2, 1, 1], [1] * 1000, [3] * 50 + [10**6]])
def test_every_stretch_has_sources_in_proportion(counts: list[int]) -> None:
    order = Interleaving(counts, 5)
    length = min(1000, order.total // 5)
    for start in np.linspace(0, order.total - length, 23).astype(int).tolist():
        held = order.before(start + length) - order.before(start)
        assert held.sum() == length
        assert (held >= 0).all()
        assert (np.abs(held - np.array(counts) / order.total * length) < 2).all()


def test_the_key_orders_sources_of_one_item() -> None:
    orders = [np.diff([Interleaving([1] * 50, key).before(t) for t in range(51)], axis=0).argmax(1) for key in (1, 2)]
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
    assert not np.array_equal(*orders)
