"""Keyed permutations and hashes: every element by itself, none twice, for ever the same."""

import re
import time
from collections import Counter

import numpy as np
import pytest

from embedtrain.data.sampling.permutation import (
    MAX_SIZE,
    Purpose,
    make_key,
    make_keys,
    permute,
    random_below,
    random_bits,
    random_uniform,
)
from tests.conftest import ROOT


def far_from_even(counts: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic of counts lies above what even chances would give."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - counts.size) / np.sqrt(2 * counts.size))


def orders(n: int, number: int) -> np.ndarray:
    """The permutations of range(n) of many keys: int64 [number, n]."""
    keys = make_keys(7, Purpose.row_order, np.arange(number))
    return np.stack([permute(np.full(number, position), n, keys) for position in range(n)], axis=1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 99, 1000, 4096, 65537])
def test_every_number_once(n: int) -> None:
    for number in range(5):
        assert np.array_equal(np.sort(permute(np.arange(n), n, make_key(number, Purpose.row_order))), np.arange(n))


def test_every_number_once_of_any_range() -> None:
    sizes = np.random.default_rng(0).integers(1, 3000, 60).tolist()
    for n in sizes:
        assert np.array_equal(np.sort(permute(np.arange(n), n, make_key(n, Purpose.row_order))), np.arange(n))


def test_ranges_and_keys_of_their_own() -> None:
    """Many calls in one."""
    sizes = np.array([1, 2, 3, 10, 1000, 2**31, MAX_SIZE])
    positions = np.array([0, 1, 0, 9, 500, 7, MAX_SIZE - 1])
    keys = make_keys(3, Purpose.row_order, np.arange(7))
    separately = [permute(positions[i : i + 1], int(sizes[i]), int(keys[i]))[0] for i in range(7)]
    assert permute(positions, sizes, keys).tolist() == separately
    assert permute(np.empty(0, dtype=np.int64), 5, 1).tolist() == []


def test_the_numbers_are_pinned() -> None:
    """Other numbers would make a resumed run see rows twice, and others never: they must not change."""
    assert make_key(1, Purpose(2), 3) == 3671048590361019180
    assert make_key(2**63, Purpose.row_order) == 7569094505744174987
    # The stream of SplitMix64 with this seed, computed by another implementation.
    assert random_bits(0, np.arange(2)).tolist() == [16294208416658607535, 7960286522194355700]
    assert random_uniform(7, np.arange(3)).tolist() == [0.3898297483912715, 0.01678829452815611, 0.9007606806068834]
    assert random_below(random_bits(7, np.arange(8)), 10).tolist() == [3, 0, 9, 5, 4, 2, 4, 3]
    assert permute(np.arange(10), 10, 0).tolist() == [1, 9, 7, 6, 3, 0, 5, 8, 2, 4]
    far = permute(np.array([0, 1, 10**9, MAX_SIZE - 1]), MAX_SIZE, 12345)
    assert far.tolist() == [1029366136606, 879955456855, 379200517602, 547878901311]


def test_keys() -> None:
    numbers = (0, 1, 2**62)
    keys = make_keys(5, Purpose.documents, np.array(numbers)).tolist()
    assert keys == [make_key(5, Purpose.documents, number) for number in numbers]
    many = [make_key(seed, purpose, *more) for seed in (0, 1, 2**64 - 1) for purpose in Purpose for more in MORE]
    assert len(set(many)) == len(many)
    assert all(0 <= key < 2**64 for key in many)


MORE = [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]


def test_each_use_of_a_seed_has_its_own_purpose() -> None:
    """Uses of one purpose draw the same numbers: that the mixed rows do not depend on the drawn negatives, say."""
    assert {purpose.name: purpose.value for purpose in Purpose} == {
        "row_order": 1, "source_order": 2, "batch_order": 3, "documents": 4, "mixed_rows": 5, "filter_parts": 6,
        "batch_negatives": 7, "mined_negatives": 8, "deleted_words": 9,
    }  # fmt: skip
    uses: dict[str, set[str]] = {}
    for path in (ROOT / "embedtrain").rglob("*.py"):
        for call in re.finditer(r"\bmake_keys?\(([^)]*)", path.read_text()):
            if not call[1].startswith("seed: int"):
                for name in re.findall(r"Purpose\.(\w+)", call[1]) or [f"no purpose: {call[0]}"]:
                    uses.setdefault(name, set()).add(path.stem)
    assert uses.keys() == Purpose.__members__.keys()
    assert all(len(files) == 1 for files in uses.values()), uses


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_are_equally_likely(n: int) -> None:
    counts = Counter(map(tuple, orders(n, 20_000).tolist()))
    number = int(np.prod(np.arange(1, n + 1)))
    assert len(counts) == number
    assert far_from_even(np.array(list(counts.values()))) < 5


@pytest.mark.parametrize("n", [9, 16, 30])
def test_positions_neighbours_and_pairs_are_uniform(n: int) -> None:
    permutations = orders(n, 10_000)
    positions = np.concatenate([np.bincount(column, minlength=n) for column in permutations.T])
    steps = np.bincount(((permutations[:, 1:] - permutations[:, :-1]) % n).ravel(), minlength=n)[1:]
    pairs = np.bincount(permutations[:, 0] * n + permutations[:, n // 2], minlength=n * n).reshape(n, n)
    for counts in (positions, steps, pairs[~np.eye(n, dtype=bool)]):
        assert far_from_even(counts) < 5


def test_a_large_range_looks_random_and_keys_do_not_agree() -> None:
    n = 100_000
    one, other = (permute(np.arange(n), n, make_key(number, Purpose.row_order)) for number in range(2))
    bound = 5 / np.sqrt(n)
    assert abs(np.corrcoef(one, np.arange(n))[0, 1]) < bound
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < bound
    assert abs(np.corrcoef(one, other)[0, 1]) < bound
    assert far_from_even(np.bincount(one[:5000] // 1000, minlength=100)) < 5
    assert int((one == other).sum()) < 10


def test_uniform_and_below() -> None:
    numbers = random_uniform(make_key(1, Purpose.row_order), np.arange(100_000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert far_from_even(np.histogram(numbers, 50, (0, 1))[0]) < 5
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02
    drawn = random_below(
        random_bits(make_key(2, Purpose.row_order), np.arange(70_000)), np.tile([1, 2, 3, 5, 7, 100, 2**24], 10_000)
    )
    for at, limit in enumerate((1, 2, 3, 5, 7, 100)):
        assert far_from_even(np.bincount(drawn[at::7], minlength=limit)) < 5
        assert drawn[at::7].max() < limit
    assert 0.99 * 2**24 < drawn[6::7].max() < 2**24


def test_a_million_at_once() -> None:
    began = time.process_time()
    permute(np.arange(10**6), 10**9, 1)
    assert time.process_time() - began < 1.0  # 0.1 s
