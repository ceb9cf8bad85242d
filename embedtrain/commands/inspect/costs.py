"""The cost of batches before any is computed: padding, chunks, and the balance of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.chunks import plan_chunks
from embedtrain.data.train_data import TrainData
from embedtrain.data.types import BatchTokens, EncoderInputs


@dataclass(frozen=True, slots=True)
class Cost:
    """The mean cost of some batches."""

    ranks: int
    tokens: float  # real tokens of a batch over all ranks
    chunks: float  # forward passes of a rank for a batch
    padding: float  # fraction of computed tokens that are padding
    imbalance: float  # computed tokens of the busiest rank, divided by the mean of all ranks


def batch_cost(
    data: TrainData,
    batches: Sequence[int],
    ranks: int,
    chunk_tokens: int,
    pass_overhead_tokens: int,
    *,
    packed: bool = False,
    inputs: Callable[[BatchTokens], EncoderInputs],
) -> Cost:
    """The cost of these batches of tokenised data; for other arguments see `plan_chunks`.

    `inputs` gives what the encoder computes of a batch: texts, or pairs of texts.
    """
    real, chunks, computed = 0, 0, []
    for number in batches:
        tokens = data.batch(number).tokens
        assert tokens is not None
        lengths = inputs(tokens).costs
        plan = plan_chunks(lengths, ranks, chunk_tokens, pass_overhead_tokens, packed=packed)
        real, chunks = real + int(lengths.sum()), chunks + plan.num_chunks
        computed.append(
            [count_computed_tokens(plan.chunks_of_rank(rank), lengths, packed=packed) for rank in range(ranks)]
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
