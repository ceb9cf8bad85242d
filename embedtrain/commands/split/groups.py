"""Which rows are held out: whole groups of rows that share a query or a positive.

R: rows of all sources; Q: distinct queries; P, N: positives and negatives of all rows, row by row.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from embedtrain.data.rows import Example
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import format_count


def equality_key(text: str) -> int:
    """A 63-bit hash that is the same for texts that differ only in white space or case."""
    normalized = " ".join(text.split()).casefold()
    digest = hashlib.blake2b(normalized.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _numbers() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class RowKeys:
    """The keys of the texts of all rows: 8 bytes each, so that no text is held in memory."""

    queries: "array[int]" = field(default_factory=_numbers)  # [R]
    positives: "array[int]" = field(default_factory=_numbers)  # [P]
    negatives: "array[int]" = field(default_factory=_numbers)  # [N]
    num_positives: "array[int]" = field(default_factory=_numbers)  # [R]
    num_negatives: "array[int]" = field(default_factory=_numbers)  # [R]

    def add(self, texts: Example) -> None:
        """Add a row."""
        self.queries.append(equality_key(texts.query))
        self.positives.extend(map(equality_key, texts.positives.texts))
        self.negatives.extend(map(equality_key, texts.negatives.texts))
        self.num_positives.append(len(texts.positives))
        self.num_negatives.append(len(texts.negatives))


@dataclass(frozen=True, slots=True)
class Split:
    """The choice of held-out rows.

    Attributes:
        is_held_out: bool [R].
        query_keys: int64 [R], of the row's query, to detect files that change while they are read.
        held_out_keys: int64, sorted: queries and positives of held-out rows. No training row may contain one.
        train_keys: int64, sorted: all texts of training rows. The held-out corpus may not contain one.
        num_queries: distinct held-out queries, and distinct queries of training rows.
        largest_group: distinct queries of the largest group that is never separated.
    """

    is_held_out: NDArray[np.bool_]
    query_keys: NDArray[np.int64]
    held_out_keys: NDArray[np.int64]
    train_keys: NDArray[np.int64]
    num_queries: tuple[int, int]
    largest_group: int


def choose_held_out(keys: RowKeys, num_queries: int, seed: int) -> Split:
    """Draw groups of rows until exactly `num_queries` queries are held out.

    Rows with an equal query or positive, and those where the query of one equals a positive of the other, are of one
    group. Raises ConfigError if no rows would be left to train on, or the groups do not add up to that number.
    """
    queries, positives, negatives, num_positives, num_negatives = (
        np.frombuffer(values, dtype=np.int64) if values else np.empty(0, dtype=np.int64)
        for values in (keys.queries, keys.positives, keys.negatives, keys.num_positives, keys.num_negatives)
    )
    num_rows = len(queries)
    groups = _groups(queries, positives, num_positives)
    _, first_rows = np.unique(queries, return_index=True)
    sizes = np.bincount(groups[first_rows], minlength=int(groups.max()) + 1)
    total = len(first_rows)
    if num_queries >= total:
        raise ConfigError(
            f"dev={num_queries}: the rows have {format_count(total, 'distinct query', 'distinct queries')}, of which "
            f"some must be left to train on: write dev={max(1, total // 10)}"
        )
    held_out_groups = np.zeros(len(sizes), dtype=bool)
    remaining = num_queries
    for group in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        size = int(sizes[group])
        if size <= remaining and size < total:
            held_out_groups[group] = True
            remaining -= size
            if not remaining:
                break
    if remaining:
        possible = num_queries - remaining
        advice = f"write dev={possible}" if possible else "remove the texts that rows share"
        raise ConfigError(
            f"dev={num_queries}: only {possible:,} of {total:,} queries can be held out without separating rows with "
            f"an equal query or positive (the largest group has {format_count(int(sizes.max()), 'query', 'queries')}): "
            f"{advice}"
        )
    is_held_out = held_out_groups[groups]
    of_positives, of_negatives = np.repeat(is_held_out, num_positives), np.repeat(is_held_out, num_negatives)
    return Split(
        is_held_out=is_held_out,
        query_keys=queries,
        held_out_keys=_unique(queries[is_held_out], positives[of_positives]),
        train_keys=_unique(queries[~is_held_out], positives[~of_positives], negatives[~of_negatives]),
        num_queries=(num_queries, total - num_queries),
        largest_group=int(sizes.max()) if num_rows else 0,
    )


def contains(keys: NDArray[np.int64], key: int) -> bool:
    """Whether sorted keys contain one."""
    index = int(keys.searchsorted(key))
    return index < len(keys) and int(keys[index]) == key


def _groups(
    queries: NDArray[np.int64], positives: NDArray[np.int64], num_positives: NDArray[np.int64]
) -> NDArray[np.int32]:
    """The group of each row, int32 [R]: the connected components of rows and the texts that they contain."""
    num_rows = len(queries)
    rows = np.concatenate([np.arange(num_rows), np.repeat(np.arange(num_rows), num_positives)])
    distinct, texts = np.unique(np.concatenate([queries, positives]), return_inverse=True)
    num_nodes = num_rows + len(distinct)
    edges = coo_array((np.ones(len(rows), dtype=bool), (rows, num_rows + texts)), shape=(num_nodes, num_nodes))
    _, labels = connected_components(edges, directed=False)
    groups: NDArray[np.int32] = labels[:num_rows]
    return groups


def _unique(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    parts: Sequence[NDArray[np.int64]] = keys
    return np.unique(np.concatenate(parts))
