"""One row's negatives, chosen among what was found for it, and what is told about them.

O negatives that the row keeps.
"""

from dataclasses import dataclass

import numpy as np

from embedtrain.data.keys import text_keys
from embedtrain.data.types import Example
from embedtrain.mine.choose import choose, threshold
from embedtrain.mine.figures import MiningStats, SuspectedLabel
from embedtrain.mine.options import MineOptions
from embedtrain.mine.prepared import MiningInputs
from embedtrain.mine.questions import QueryCandidates
from embedtrain.mine.relation import IntArray
from embedtrain.mine.written import MinedNegatives, format_row


@dataclass(frozen=True, slots=True)
class RowCandidates:
    """A row, what was found for its question, and the negatives that it keeps, int64 [O]."""

    row: Example
    question: QueryCandidates
    own: IntArray


@dataclass(frozen=True, slots=True)
class MinedRow:
    """What is written of a row, and what is told."""

    line: str
    figures: MiningStats


def mine_row(found: RowCandidates, prepared: MiningInputs, options: MineOptions, name: str, source: int) -> MinedRow:
    """Choose a row's negatives.

    Args:
        found: for it.
        prepared: of all rows.
        options: of the door.
        name: of the row's source.
        source: its number.
    """
    pool, row, of = prepared.pool, found.row, found.question
    positive = of.positive
    taken = np.isin(pool.stripped_keys[of.candidates], pool.stripped_keys[found.own])
    chosen = choose(of.scores, pool.keys[of.candidates], positive, len(found.own), taken, of.key, options)
    negatives = np.concatenate([found.own, of.candidates[chosen]])
    scores = np.concatenate([of.own_scores[np.searchsorted(of.own, found.own)], of.scores[chosen]])
    mine = np.searchsorted(of.answers, pool.numbers(text_keys(row.positives).numpy()))
    of_positives = of.answer_scores[mine]
    ids = prepared.ids[source]
    names = [] if ids is None else [ids.of(number) for number in negatives.tolist()]
    line = format_row(
        row,
        MinedNegatives(
            [pool[number] for number in negatives.tolist()],
            names if any(names) else [],
        ),
        (of_positives.tolist(), scores.tolist()) if options.scores else None,
    )
    most = threshold(positive, options)
    best = int(of.scores.argmax()) if len(of.scores) else -1
    is_near = best >= 0 and float(of.scores[best]) > min(positive, most)
    ranks = of.answer_ranks[mine]
    lost = mine[ranks >= options.rank_max]

    def suspect(answer: int, candidate: int) -> SuspectedLabel:
        return SuspectedLabel(
            source=name,
            place=f"{row.file}:{row.line}",
            query=row.query,
            positive=pool[int(of.answers[answer])],
            positive_score=float(of.answer_scores[answer]),
            document=pool[int(of.candidates[candidate])],
            score=float(of.scores[candidate]),
            written=bool(candidate in chosen or taken[candidate]),
        )

    figures = MiningStats(
        negatives=np.array([len(negatives)]),
        positive_scores=of_positives,
        negative_scores=scores,
        positive_ranks=ranks[ranks < options.rank_max] + 1,
        negative_ranks=chosen + 1,
        num_candidates=len(of.candidates),
        num_above_margin=int((of.scores.astype(np.float64) > most).sum()),
        num_above_positive=int((of.scores > np.float32(positive)).sum()),
        num_lost=len(lost),
        # One of each row: twenty from one bad row would say nothing of the others.
        false_negatives=[suspect(of.reference, best)] if is_near else [],
        wrong_labels=[suspect(int(lost[of.answer_scores[lost].argmin()]), best)] if len(lost) else [],
    )
    return MinedRow(line, figures)
