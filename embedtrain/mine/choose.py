"""Which candidates of one row become its negatives.

C candidates, best first by the scores that count; n of them are chosen.
"""

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sampling.permutation import make_key, random_bits
from embedtrain.mine.options import MarginReference, MineOptions, Sampling
from embedtrain.mine.relation import IntArray
from embedtrain.mine.window import FloatArray

# What the key is for: `order` takes other numbers from the same seed.
_MINE = 5


def reference(scores: FloatArray, margin_reference: MarginReference) -> int:
    """Which of a question's positives margins are taken from."""
    return int(scores.argmin() if margin_reference is MarginReference.lowest else scores.argmax())


def threshold(positive: float, options: MineOptions) -> float:
    """The score above which a candidate is too near the positive; infinity where no margin is asked for.

    The relative margin is a share of the score's magnitude, so that it lowers a negative score as well, as in
    sentence-transformers; for others it is the positive-aware rule of Moreira et al., "NV-Retriever" (2024),
    arXiv 2407.15831: 0.05 keeps what scores at most 95 % of the positive.
    """
    most = np.inf
    if options.absolute_margin is not None:
        most = min(most, positive - options.absolute_margin)
    if options.relative_margin is not None:
        most = min(most, positive - options.relative_margin * abs(positive))
    return most


def passes_filters(scores: FloatArray, positive: float, options: MineOptions) -> NDArray[np.bool_]:
    """Which candidates qualify by their scores, bool [C]: a score equal to a limit does."""
    exact = scores.astype(np.float64)
    passes = exact <= threshold(positive, options)
    if options.max_score is not None:
        passes &= exact <= options.max_score
    if options.min_score is not None:
        passes &= exact >= options.min_score
    return passes


def choose(
    scores: FloatArray,
    keys: IntArray,
    positive: float,
    own: int,
    taken: NDArray[np.bool_],
    question: int,
    options: MineOptions,
) -> IntArray:
    """The places of the candidates that become negatives, int64 [n], best first.

    As in sentence-transformers' `mine_hard_negatives`, `rank_min` passes over the best of those that qualify. Which
    are drawn at random is a function of the seed, the question and the documents alone.

    Args:
        scores: float32 [C]; of the teacher, where there is one.
        keys: int64 [C], of their texts.
        positive: the score that margins are taken from.
        own: negatives that the row keeps.
        taken: bool [C], those that are among them.
        question: the key of what the row asks.
        options: of the door.
    """
    places = np.flatnonzero(passes_filters(scores, positive, options))
    # A teacher's order is another than that in which they were found; of equal scores the first found is first.
    places = places[np.argsort(-scores[places], kind="stable")][options.rank_min :]
    places = places[~taken[places]]
    count = max(0, options.negatives - own)
    if options.sampling is Sampling.random and len(places) > count:
        drawn = np.argsort(random_bits(make_key(options.seed, _MINE, question), keys[places]), kind="stable")[:count]
        places = places[np.sort(drawn)]
    return places[:count].astype(np.int64)
