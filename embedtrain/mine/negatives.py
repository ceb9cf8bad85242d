"""The choice of one row's negatives among its candidates, and the row as a line of JSON.

C is the number of candidates.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.keys import text_keys
from embedtrain.data.sampling.permutation import make_key, random_bits
from embedtrain.data.types import Example
from embedtrain.mine.candidates import FloatArray, QueryCandidates
from embedtrain.mine.inputs import MiningInputs
from embedtrain.mine.multimap import IntArray
from embedtrain.mine.options import MineOptions, Sampling
from embedtrain.mine.stats import MiningStats, SuspectedLabel

# Purpose of the random key: the data order derives other numbers from the same seed.
_MINING_KEY = 5


@dataclass(frozen=True, slots=True)
class RowToMine:
    """A row with the number and name of its source, and the negatives that it keeps (document numbers, int64)."""

    row: Example
    source: int
    source_name: str
    existing: IntArray


@dataclass(frozen=True, slots=True)
class MinedRow:
    """A row as it is written, and its statistics."""

    line: str
    stats: MiningStats


def mine_row(target: RowToMine, query: QueryCandidates, inputs: MiningInputs, options: MineOptions) -> MinedRow:
    """Choose the negatives of one row among the candidates of its query."""
    pool, row = inputs.pool, target.row
    is_existing = np.isin(pool.stripped_keys[query.candidates], pool.stripped_keys[target.existing])
    chosen = _choose(query, pool.keys[query.candidates], is_existing, len(target.existing), options)
    negatives = np.concatenate([target.existing, query.candidates[chosen]])
    existing_scores = query.existing_scores[np.searchsorted(query.existing, target.existing)]
    scores = np.concatenate([existing_scores, query.scores[chosen]])
    positives = np.searchsorted(query.answers, pool.numbers(text_keys(row.positives).numpy()))
    positive_scores = query.answer_scores[positives]
    source_ids = inputs.ids[target.source]
    ids = [] if source_ids is None else [source_ids.get(number) for number in negatives.tolist()]
    line = format_row(
        row,
        MinedNegatives([pool[number] for number in negatives.tolist()], ids if any(ids) else []),
        (positive_scores.tolist(), scores.tolist()) if options.scores else None,
    )
    return MinedRow(line, _row_stats(target, query, inputs, options, positives, chosen, is_existing, scores))


def _row_stats(
    target: RowToMine,
    query: QueryCandidates,
    inputs: MiningInputs,
    options: MineOptions,
    positives: IntArray,
    chosen: IntArray,
    is_existing: NDArray[np.bool_],
    scores: FloatArray,
) -> MiningStats:
    """Statistics of one row.

    Args:
        target: the row.
        query: its candidates and answers.
        inputs: with the texts of documents.
        options: of the command.
        positives: indices of the row's positives among the answers.
        chosen: indices of the new negatives among the candidates.
        is_existing: bool [C], candidates among the negatives that the row keeps.
        scores: of all negatives of the row.
    """
    limit = threshold(query.reference_score, options)
    best = int(query.scores.argmax()) if len(query.scores) else -1
    best_is_too_high = best >= 0 and float(query.scores[best]) > min(query.reference_score, limit)
    ranks = query.answer_ranks[positives]
    beyond_window = positives[ranks >= options.rank_max]

    def suspect(answer: int) -> SuspectedLabel:
        return SuspectedLabel(
            source=target.source_name,
            place=f"{target.row.file}:{target.row.line}",
            query=target.row.query,
            positive=inputs.pool[int(query.answers[answer])],
            positive_score=float(query.answer_scores[answer]),
            document=inputs.pool[int(query.candidates[best])],
            score=float(query.scores[best]),
            written=bool(best in chosen or is_existing[best]),
        )

    return MiningStats(
        negatives=np.array([len(scores)]),
        positive_scores=query.answer_scores[positives],
        negative_scores=scores,
        positive_ranks=ranks[ranks < options.rank_max] + 1,
        negative_ranks=chosen + 1,
        num_candidates=len(query.candidates),
        num_above_margin=int((query.scores.astype(np.float64) > limit).sum()),
        num_above_positive=int((query.scores > np.float32(query.reference_score)).sum()),
        # One of each row: twenty from a single bad row would hide the others.
        false_negatives=[suspect(query.reference)] if best_is_too_high else [],
        wrong_labels=[suspect(int(beyond_window[query.answer_scores[beyond_window].argmin()]))]
        if len(beyond_window)
        else [],
    )


def threshold(positive_score: float, options: MineOptions) -> float:
    """The score above which a candidate is too close to the positive; infinity without a margin.

    The relative margin is a fraction of the score's magnitude, so that it lowers a negative score as well, as in
    sentence-transformers; for positive scores it is the positive-aware rule of Moreira et al., "NV-Retriever" (2024),
    arXiv 2407.15831: 0.05 keeps candidates that score at most 95 % of the positive.
    """
    limit = np.inf
    if options.absolute_margin is not None:
        limit = min(limit, positive_score - options.absolute_margin)
    if options.relative_margin is not None:
        limit = min(limit, positive_score - options.relative_margin * abs(positive_score))
    return limit


def _qualifies(scores: FloatArray, positive_score: float, options: MineOptions) -> NDArray[np.bool_]:
    """Which candidates are within all limits on the score, which are inclusive: bool [C]."""
    exact = scores.astype(np.float64)
    qualifies = exact <= threshold(positive_score, options)
    if options.max_score is not None:
        qualifies &= exact <= options.max_score
    if options.min_score is not None:
        qualifies &= exact >= options.min_score
    return qualifies


def _choose(
    query: QueryCandidates, keys: IntArray, is_existing: NDArray[np.bool_], num_existing: int, options: MineOptions
) -> IntArray:
    """Indices of the candidates that become negatives, int64 [n], best first.

    As in sentence-transformers' `mine_hard_negatives`, `rank_min` skips the best of the candidates that qualify.
    Random sampling depends on the seed, the query and the documents alone.

    Args:
        query: with C candidates.
        keys: int64 [C], text keys of the candidates.
        is_existing: bool [C], candidates among the negatives that the row keeps.
        num_existing: the number of negatives that the row keeps.
        options: of the command.
    """
    scores = query.scores
    indices = np.flatnonzero(_qualifies(scores, query.reference_score, options))
    # A teacher's scores are not in the order of the search; ties keep that order.
    indices = indices[np.argsort(-scores[indices], kind="stable")][options.rank_min :]
    indices = indices[~is_existing[indices]]
    count = max(0, options.negatives - num_existing)
    if options.sampling is Sampling.random and len(indices) > count:
        bits = random_bits(make_key(options.seed, _MINING_KEY, query.key), keys[indices])
        indices = indices[np.sort(np.argsort(bits, kind="stable")[:count])]
    return indices[:count].astype(np.int64)


@dataclass(frozen=True, slots=True)
class MinedNegatives:
    """The negatives of a row, best first.

    Attributes:
        texts: of the documents.
        ids: one per text, "" for none; empty if the source has none of them.
    """

    texts: Sequence[str]
    ids: Sequence[str]


def format_row(row: Example, negatives: MinedNegatives, scores: tuple[Sequence[float], Sequence[float]] | None) -> str:
    """The row with new negatives, as JSON in FlagEmbedding's layout; our reader restores the same row from it.

    Args:
        row: as it was read.
        negatives: replace the row's own.
        scores: float32 scores of the positives and of the negatives; None writes none.
    """
    query, positives, texts = row.query, list(row.positives), list(negatives.texts)
    fields: dict[str, Any] = {"query": query, "pos": positives, "neg": texts}
    symmetric = row.document_instruction is not None and row.document_instruction == row.instruction
    if row.document_instruction is not None and (row.most_negatives is not None or not symmetric):
        document_instruction = row.document_instruction
        fields["query"] = [row.instruction or "", query]
        fields["pos"] = [[document_instruction, text] for text in positives]
        fields["neg"] = [[document_instruction, text] for text in texts]
    elif row.instruction is not None:
        fields["prompt"] = row.instruction
        if symmetric:
            fields["type"] = "symmetric_sts"
    if row.most_negatives is not None:
        fields["type"] = "only_1neg"
    if row.positive_ids:
        fields["pos_id"] = [name or None for name in row.positive_ids]
    if negatives.ids:
        fields["neg_id"] = [name or None for name in negatives.ids]
    if scores is not None:
        fields["pos_scores"], fields["neg_scores"] = (list(map(_shortest, values)) for values in scores)
    return json.dumps(fields, ensure_ascii=False)


def _shortest(score: float) -> float:
    """The shortest decimal that rounds to the same float32: 0.9, not 0.8999999761581421."""
    return float(str(np.float32(score)))
