"""Drawing of positives and negatives: fair, without repetition, a function of the seed and the row's position."""

import time

import numpy as np

from embedtrain.data.sampling.plan import NO_LIMIT, Selection, draw


def whole(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def by_row(drawn: Selection) -> list[list[int]]:
    return [drawn.negatives[drawn.owners == row].tolist() for row in range(len(drawn.counts))]


def test_selected_documents() -> None:
    drawn = draw(whole([1, 3, 0, 2, 1]), whole([2, 5, 0, 0, 3]), 3, np.arange(5), seed=1)
    rows = by_row(drawn)
    assert [len(row) for row in rows] == drawn.counts.tolist() == [2, 3, 0, 0, 3]
    assert (np.diff(drawn.owners) >= 0).all()
    assert rows[0] == [0, 1]  # in their order where all fit
    assert rows[4] == [0, 1, 2]
    assert len(set(rows[1])) == 3
    assert set(rows[1]) <= set(range(5))
    assert drawn.positive[0] == drawn.positive[4] == 0
    assert drawn.positive[2] == -1
    assert all(part.dtype == np.int64 for part in (drawn.positive, drawn.negatives, drawn.owners, drawn.counts))


def test_limits() -> None:
    positives, negatives = np.ones(4, dtype=np.int64), np.full(4, 6)
    for everything in (NO_LIMIT, 6, 99):
        assert by_row(draw(positives, negatives, everything, np.arange(4), 1)) == [list(range(6))] * 4
    assert draw(positives, negatives, 0, np.arange(4), 1).negatives.tolist() == []
    assert draw(positives, negatives, whole([NO_LIMIT, 0, 2, 7]), np.arange(4), 1).counts.tolist() == [6, 0, 2, 6]
    assert draw(whole([0]), whole([4]), NO_LIMIT, whole([0]), 1).counts.tolist() == [0]
    nothing = whole([])
    assert draw(nothing, nothing, 7, nothing, 1).negatives.tolist() == []


def test_lists_take_other_positives_like_negatives() -> None:
    """All documents once, the drawn positive first; with a limit each of the others is as likely."""
    positives, negatives, lists = whole([3, 1, 4, 3]), whole([2, 3, 0, 2]), np.array([True, True, True, False])
    drawn = draw(positives, negatives, NO_LIMIT, np.arange(4), seed=5, other_positives=lists)
    assert drawn.counts.tolist() == [4, 3, 3, 2]
    for row, others in enumerate(by_row(drawn)[:3]):
        documents = [int(drawn.positive[row]), *(int(positives[row]) + other for other in others)]
        assert sorted(documents) == list(range(positives[row] + negatives[row]))
    assert by_row(drawn)[3] == [0, 1]
    number = 20_000
    drawn = draw(np.full(number, 2), np.full(number, 3), 2, np.arange(number), 4, np.ones(number, dtype=bool))
    assert (drawn.counts == 2).all()
    documents = np.concatenate([drawn.positive, 2 + drawn.negatives])
    assert np.abs(np.bincount(documents, minlength=5) / number - [3 / 4, 3 / 4, 1 / 2, 1 / 2, 1 / 2]).max() < 0.02
    assert all(
        len({2 + other for other in row} | {int(drawn.positive[i])}) == 3 for i, row in enumerate(by_row(drawn)[:50])
    )


def test_the_draw_of_a_row_does_not_depend_on_other_rows() -> None:
    random = np.random.default_rng(3)
    positives, negatives = random.integers(1, 5, 200), random.integers(0, 40, 200)
    positions = 10**12 + np.arange(200)
    whole_batch = draw(positives, negatives, 7, positions, seed=9)
    rows = by_row(whole_batch)
    for at in (0, 17, 199):
        single = draw(positives[at : at + 1], negatives[at : at + 1], 7, positions[at : at + 1], seed=9)
        assert by_row(single) == [rows[at]]
        assert single.positive[0] == whole_batch.positive[at]
    for other in (
        draw(positives, negatives, 7, positions, seed=10),
        draw(positives, negatives, 7, positions + 200, seed=9),
    ):
        assert by_row(other) != rows
        assert not np.array_equal(other.positive, whole_batch.positive)


def test_the_draw_is_pinned() -> None:
    """A resumed run must draw what it would have drawn."""
    drawn = draw(whole([4, 4, 4]), whole([9, 2, 9]), 4, whole([0, 1, 2]), seed=42)
    assert drawn.positive.tolist() == [0, 3, 1]
    assert by_row(drawn) == [[0, 1, 8, 6], [0, 1], [3, 1, 2, 4]]


def test_draws_are_uniform_and_in_random_order() -> None:
    number = 30_000
    drawn = draw(np.full(number, 3), np.full(number, 5), 2, np.arange(number), seed=4)
    assert np.abs(np.bincount(drawn.positive, minlength=3) / number - 1 / 3).max() < 0.015
    pairs = drawn.negatives.reshape(number, 2)
    counts = np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).reshape(5, 5)
    assert counts.trace() == 0
    assert np.abs(counts[~np.eye(5, dtype=bool)] / number - 1 / 20).max() < 0.007
    assert abs(np.corrcoef(drawn.positive, pairs[:, 0])[0, 1]) < 0.03


def test_a_batch_of_many_candidates() -> None:
    negatives = np.random.default_rng(5).integers(0, 100, 4096)
    began = time.process_time()
    draw(np.ones(4096, dtype=np.int64), negatives, 7, np.arange(4096), seed=1)
    assert time.process_time() - began < 0.5  # 0.01 s
