"""What batches cost before any is computed: padding, chunks, and how evenly the work falls to ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.chunks import plan_chunks
from embedtrain.data.train_data import TrainData


@dataclass(frozen=True, slots=True)
class Cost:
    """What some batches cost on a number of ranks.

    Attributes:
        ranks: how many.
        tokens: real tokens of a batch over all ranks, the mean.
        chunks: forward passes of a rank for a batch, the mean.
        padding: share of computed tokens that are padding.
        imbalance: tokens that the busiest rank computes, by the mean of all ranks; the mean of the batches.
    """

    ranks: int
    tokens: float
    chunks: float
    padding: float
    imbalance: float


def batch_cost(
    data: TrainData,
    batches: Sequence[int],
    ranks: int,
    chunk_tokens: int,
    pass_overhead_tokens: int,
    *,
    packed: bool = False,
) -> Cost:
    """What these batches cost; the data's tokens must be kept.

    Args:
        data: prepared with a tokenizer.
        batches: their numbers.
        ranks: how many ranks share them.
        chunk_tokens: see `plan_chunks`.
        pass_overhead_tokens: likewise.
        packed: likewise.
    """
    real, chunks, computed = 0, 0, []
    for number in batches:
        tokens = data.batch(number).tokens
        assert tokens is not None
        dealt = plan_chunks(tokens.lengths, ranks, chunk_tokens, pass_overhead_tokens, packed=packed)
        real, chunks = real + int(tokens.lengths.sum()), chunks + dealt.num_chunks
        computed.append(
            [count_computed_tokens(dealt.chunks_of_rank(rank), tokens.lengths, packed=packed) for rank in range(ranks)]
        )
    by_rank = np.array(computed, dtype=np.float64)
    return Cost(
        ranks,
        real / len(batches),
        chunks / len(batches),
        1 - real / float(by_rank.sum()),
        float((by_rank.max(axis=1) / by_rank.mean(axis=1)).mean()),
    )


def count_computed_tokens(
    chunks: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64], *, packed: bool = False
) -> int:
    """Tokens that a rank computes for its chunks of texts, padding included, unless they are packed."""
    if packed:
        return sum(int(lengths[chunk].sum()) for chunk in chunks)
    return sum(len(chunk) * int(lengths[chunk].max()) for chunk in chunks if len(chunk))
