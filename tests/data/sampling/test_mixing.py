"""How many rows of each source an epoch has."""

import numpy as np
import pytest

from embedtrain.config.recipe import WeightMode
from embedtrain.data.sampling.plan import rows_per_source_of_epoch
from embedtrain.errors import ConfigError

EPOCHS, PROPORTIONS = WeightMode.epochs, WeightMode.proportions


def rows(
    sizes: list[int],
    weights: list[float] | None = None,
    most: list[int | None] | None = None,
    kind: WeightMode = EPOCHS,
    temperature: float = 1.0,
) -> list[int]:
    weights, most = weights or [1.0] * len(sizes), most or [None] * len(sizes)
    return rows_per_source_of_epoch(sizes, weights, max_rows=most, mode=kind, temperature=temperature)


def test_weights_as_epochs() -> None:
    assert rows([100, 100, 101, 10], [0.5, 2.0, 1.5, 1.0]) == [50, 200, 152, 10]
    assert rows([5, 15, 25], [0.1, 0.1, 0.1]) == [1, 2, 3]  # halves go up; 0.1 is a tenth
    assert rows([3, 0], [0.01, 1.0]) == [1, 0]
    assert rows([1000, 1000, 30], [2.0, 0.3, 1.0], [500, 500, 50]) == [500, 300, 30]


def test_weights_as_proportions() -> None:
    assert rows([900, 100], [1.0, 1.0], kind=PROPORTIONS) == [500, 500]
    assert rows([900, 100, 500], [1.0, 3.0, 4.0], [300, None, None], PROPORTIONS) == [113, 337, 450]
    assert rows([1, 1, 1], [1.0, 1.0, 1.0], kind=PROPORTIONS) == [1, 1, 1]
    assert rows([4, 4, 3], [0.1, 0.1, 0.1], kind=PROPORTIONS) == [4, 4, 3]  # the remainder goes to the first
    assert rows([10, 0], [1.0, 9.0], kind=PROPORTIONS) == [10, 0]  # a source without rows is left out


def test_every_source_has_rows_and_the_total_is_exact() -> None:
    assert rows([10, 10, 980], [0.0001, 0.0001, 5.0], kind=PROPORTIONS) == [1, 1, 998]
    random = np.random.default_rng(1)
    for kind in WeightMode:
        for _ in range(30):
            sizes = random.integers(0, 200, 12).tolist()
            weights = np.exp(random.normal(0, 4, 12)).tolist()
            base = rows(sizes, weights, kind=kind)
            if kind == PROPORTIONS:
                assert sum(base) == sum(sizes)
            for temperature in (0.3, 2.0, 50.0):
                counts = rows(sizes, weights, kind=kind, temperature=temperature)
                assert sum(counts) == sum(base)
                assert [count > 0 for count in counts] == [size > 0 for size in sizes]


def test_temperature() -> None:
    assert rows([900, 100], temperature=2.0) == [750, 250]  # 3 to 1
    assert rows([900, 100], [1.0, 9.0], temperature=2.0) == [900, 900]
    assert rows([900, 100], temperature=0.5) == [988, 12]  # 81 to 1
    hot = rows([10**6, 10**3, 10], temperature=100.0)
    assert hot[0] - hot[2] < 0.13 * sum(hot) / 3
    assert rows([7, 0, 5], temperature=3.0)[1] == 0


def test_max_rows_holds_for_any_proportions() -> None:
    assert rows([900, 100], [1.0, 1.0], [None, 100], PROPORTIONS) == [500, 100]
    assert rows([900, 100], most=[None, 100], temperature=2.0) == [750, 100]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_options(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: weight=.* must be above 0"):
        rows([3, 3], [1.0, bad])
    with pytest.raises(ConfigError, match=r"data\.mixing_temperature=.* must be above 0"):
        rows([3], temperature=bad)
    with pytest.raises(ConfigError, match=r"max_rows=0 must be at least 1"):
        rows([3], most=[0])
