"""Documents of other rows as negatives: which may be drawn, how many, and how often."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from embedtrain.data.sampling.plan import BatchDocuments, draw_batch_negatives

# A row: its query, the documents that it holds as (text, id), and which of them the batch uses.
Row = tuple[str, list[tuple[str, str]], list[int]]


def random_rows(seed: int, count: int = 12) -> list[Row]:
    """Few queries and documents, so that many are equal; a quarter of the documents have one of few ids."""
    generator = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(count):
        number = int(generator.integers(1, 5))
        texts = generator.choice(24, number, replace=False).tolist()
        ids = [f"id{generator.integers(6)}" if generator.random() < 0.25 else "" for _ in texts]
        used = sorted(generator.choice(number, int(generator.integers(1, number + 1)), replace=False).tolist())
        rows.append((f"t{generator.integers(14)}", [(f"t{t}", i) for t, i in zip(texts, ids, strict=True)], used))
    return rows


def documents_of(rows: list[Row], known: Sequence[tuple[str, str]] = ()) -> BatchDocuments:
    """The same as arrays of keys; `known` are queries and documents that answer them in other rows."""
    keys = {text: number * 7919 % 1009 for number, text in enumerate(f"t{i}" for i in range(24))}
    held = [document for _, documents, _ in rows for document in documents]
    starts = np.cumsum([0, *(len(documents) for _, documents, _ in rows)])
    return BatchDocuments(
        query_keys=np.array([keys[query] for query, _, _ in rows]),
        keys=np.array([keys[text] for text, _ in held], dtype=np.int64),
        ids=np.array([int(name[2:]) if name else -1 for _, name in held], dtype=np.int64),
        counts=np.diff(starts),
        used=np.array(
            [start + index for start, (_, _, used) in zip(starts, rows, strict=False) for index in used], dtype=np.int64
        ),
        known_answers=np.array(
            [(keys[query], keys[text]) for query, text in known if query in {row[0] for row in rows}], dtype=np.int64
        ).reshape(-1, 2),
    )


def drawn(
    rows: list[Row], limits: list[int], *, seed: int = 5, step: int = 0, known: Sequence[tuple[str, str]] = ()
) -> list[list[tuple[str, str]]]:
    """The documents that each row gets."""
    negatives = draw_batch_negatives(documents_of(rows, known), np.array(limits), seed, step)
    used = [documents[index] for _, documents, indices in rows for index in indices]
    ends = np.cumsum(negatives.counts)[:-1]
    return [[used[index] for index in part.tolist()] for part in np.split(negatives.documents, ends)]


@pytest.mark.parametrize("seed", range(20))
def test_what_a_row_may_get_and_how_much(seed):
    rows = random_rows(seed)
    limits = [(3 * i + seed) % 7 for i in range(len(rows))]
    used = {documents[index] for _, documents, indices in rows for index in indices}
    for (query, _, _), limit, negatives in zip(rows, limits, drawn(rows, limits), strict=True):
        held = [document for other, documents, _ in rows if other == query for document in documents]
        texts, ids = {query} | {text for text, _ in held}, {name for _, name in held if name}
        allowed = {(text, name) for text, name in used if text not in texts and name not in ids}
        assert set(negatives) <= allowed
        assert len({text for text, _ in negatives}) == len(negatives)
        names = [name for _, name in negatives if name]
        assert len(set(names)) == len(names)
        # As many as there are; documents that are equal by text in one row and by id in another count less.
        assert len(negatives) == limit or len(negatives) >= min(limit, len({text for text, _ in allowed}) - 6)
    without_ids: list[Row] = [(query, [(text, "") for text, _ in held], indices) for query, held, indices in rows]
    known = [(f"t{i}", f"t{(i + seed) % 24}") for i in range(14)]
    of_known = drawn(without_ids, limits, known=known)
    for (query, _, _), limit, negatives in zip(without_ids, limits, of_known, strict=True):
        texts = {query} | {text for other, held, _ in rows if other == query for text, _ in held}
        texts |= {text for other, text in known if other == query}
        assert not texts & {text for text, _ in negatives}
        assert len(negatives) == min(limit, len({text for text, _ in used} - texts))


def test_a_function_of_seed_and_step_that_draws_all_alike():
    rows: list[Row] = [(f"t{i}", [(f"t{12 + i}", "")], [0]) for i in range(12)]
    limits = [3] * 12
    assert drawn(rows, limits) == drawn(rows, limits)
    assert drawn(rows, limits) != drawn(rows, limits, step=1)
    assert drawn(rows, limits) != drawn(rows, limits, seed=6)
    counts = Counter(
        (row, text) for step in range(400) for row, texts in enumerate(drawn(rows, limits, step=step)) for text in texts
    )
    assert len(counts) == 12 * 11
    expected = 400 * 3 / 11
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())


def test_many_rows_with_one_query():
    """Every second document is excluded for a row, which takes no longer to draw than other batches."""
    rows: list[Row] = [(f"t{i % 2}", [(f"t{2 + i % 20}", "")], [0]) for i in range(4000)]
    for (query, _, _), negatives in zip(rows, drawn(rows, [3] * 4000), strict=True):
        assert len({text for text, _ in negatives}) == 3
        assert all(int(text[1:]) % 2 != int(query[1:]) for text, _ in negatives)


def test_rows_that_answer_one_query_and_batches_without_documents():
    rows: list[Row] = [("t1", [(f"t{12 + i}", "")], [0]) for i in range(4)]
    assert drawn(rows, [2] * 4) == [[], [], [], []]
    empty: list[Row] = [("t1", [], []), ("t2", [], [])]
    assert drawn(empty, [2, 2]) == [[], []]
