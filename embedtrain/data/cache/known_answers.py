"""The positives of each query that has several of them in the training data, on disk: written once, then memory-mapped.

R: rows of all sources; Q: different queries that have at least two different positives; A: positives of these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.cache.cache import (
    FORMAT,
    JOINED,
    Build,
    Cache,
    allow_open_files,
    build,
    is_complete,
    json_digest,
    map_array,
    write_array,
)
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.cache.token_store import TokenStore
from embedtrain.data.types import gather_ranges, no_answers
from embedtrain.errors import DataError

ANSWERS_PER_BLOCK = 1 << 18  # larger blocks are sorted more slowly
_FILES = ("queries", "starts", "documents")


@dataclass(frozen=True, eq=False)
class KnownAnswers:
    """The positives of queries, from all rows of all sources. A query with one positive is left out.

    Attributes:
        queries: int64 [Q], keys of the queries, ascending.
        starts: int64 [Q + 1], the answers of query q are `documents[starts[q] : starts[q + 1]]`.
        documents: int64 [A], keys of the positives, ascending for each query.
    """

    queries: NDArray[np.int64]
    starts: NDArray[np.int64]
    documents: NDArray[np.int64]

    def among(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """All pairs of a query and one of its answers, among the keys of a batch: int64 [n, 2], each pair once."""
        queries, documents = np.unique(queries), np.unique(documents)
        if not (len(self.queries) and len(documents)):
            return no_answers()
        index = np.searchsorted(self.queries, queries)
        index[index == len(self.queries)] = 0
        is_known = self.queries[index] == queries
        queries, index = queries[is_known], index[is_known]
        starts, counts = self.starts[index], self.starts[index + 1] - self.starts[index]
        # Documents are searched among the answers of a query that has more of them than the batch has documents.
        is_long = counts > len(documents)
        answers = gather_ranges(self.documents, starts[~is_long], counts[~is_long])
        of_batch = documents[np.minimum(np.searchsorted(documents, answers), len(documents) - 1)] == answers
        pairs = [np.stack([np.repeat(queries[~is_long], counts[~is_long]), answers], axis=1)[of_batch]]
        for query, start, count in zip(queries[is_long], starts[is_long], counts[is_long], strict=True):
            answers = self.documents[start : start + count]
            found = documents[answers[np.minimum(np.searchsorted(answers, documents), count - 1)] == documents]
            pairs.append(np.stack([np.full_like(found, query), found], axis=1))
        return np.concatenate(pairs)


def prepare_answers(rows: Sequence[RowStore], tokens: Sequence[TokenStore], cache: Cache) -> KnownAnswers:
    """The answers that the rows of these sources have; they are written if they are not in the cache.

    Processes that call this with the same arguments share the work.

    Raises:
        DataError: the cache cannot be written, or was cleaned up during the build.
    """
    directory = cache.directory / f"answers-{json_digest([FORMAT, [store.content for store in rows]])}"
    if is_complete(directory):
        cache.verification.add(directory)
    else:
        progress = partial(cache.progress, "listing queries with several positives")
        build([Build(directory, dict, partial(_write, rows, tokens), progress=progress)])
    allow_open_files(len(_FILES))
    try:
        return KnownAnswers(*(map_array(directory / JOINED / f"{name}.bin", np.int64) for name in _FILES))
    except OSError as error:
        raise DataError(
            f"{directory}: the cache cannot be opened ({error.strerror or error}): start again, and let nothing clean "
            "up this folder meanwhile"
        ) from error


def _write(rows: Sequence[RowStore], tokens: Sequence[TokenStore], path: Path) -> None:
    """Write the arrays of `KnownAnswers` to a folder."""
    path.mkdir()
    lengths = [np.empty(0, dtype=np.int64)]
    with (path / "queries.bin").open("wb") as queries, (path / "documents.bin").open("wb") as documents:
        for pairs in _blocks(rows, tokens):
            different, starts = np.unique(pairs[:, 0], return_index=True)
            counts = np.diff(starts, append=len(pairs))
            several = counts > 1
            queries.write(np.ascontiguousarray(different[several]).data.cast("B") if several.any() else b"")
            kept = np.ascontiguousarray(pairs[np.repeat(several, counts), 1])
            documents.write(kept.data.cast("B") if len(kept) else b"")
            lengths.append(counts[several])
    write_array(path / "starts.bin", np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))


def _blocks(rows: Sequence[RowStore], tokens: Sequence[TokenStore]) -> Iterator[NDArray[np.int64]]:
    """The different pairs of a query and a positive, ascending, of queries that have several positives or rows.

    All pairs of a query are in the same block: int64 [n, 2].
    """
    # Row r of source s is row first[s] + r of all.
    first = np.cumsum([0, *(len(store) for store in rows)])
    keys = np.concatenate([store.keys[store.row_starts[:-1]] for store in tokens])
    counts = np.concatenate([store.num_positives for store in rows]).astype(np.int64)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.empty(0, np.int64)
    num_rows = np.diff(starts, append=len(keys))
    num_answers = np.add.reduceat(counts[order], starts) if len(starts) else starts
    several = num_answers > 1
    order, keys = order[np.repeat(several, num_rows)], keys[np.repeat(several, num_rows)]
    num_rows, num_answers = num_rows[several], num_answers[several]
    # The queries of each block: as many as have about ANSWERS_PER_BLOCK answers.
    block = (np.cumsum(num_answers) - num_answers) // ANSWERS_PER_BLOCK
    ends = np.flatnonzero(np.concatenate([block[1:] != block[:-1], [True]])) + 1 if len(block) else block
    row_ends = np.cumsum(num_rows)
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True) if len(ends) else ():
        chosen = slice(int(row_ends[start - 1]) if start else 0, int(row_ends[end - 1]))
        sources = np.searchsorted(first, order[chosen], side="right") - 1
        pairs = []
        for source in np.unique(sources):
            of_source = order[chosen][sources == source] - first[source]
            store, number = tokens[source], counts[first[source] + of_source]
            positives = gather_ranges(store.keys, store.row_starts[of_source] + 1, number)
            pairs.append(np.stack([np.repeat(keys[chosen][sources == source], number), positives], axis=1))
        joined = np.concatenate(pairs)
        joined = joined[np.lexsort((joined[:, 1], joined[:, 0]))]
        is_first = np.concatenate([[True], (joined[1:] != joined[:-1]).any(axis=1)])
        yield joined[is_first]
