"""One row's negatives, chosen among what was found for it, and what is told about them.

C candidates, A documents that answer the same question, O negatives that the row keeps.
"""

from dataclasses import dataclass

import numpy as np

from embedtrain.config.mining import MineOptions
from embedtrain.data.keys import text_keys
from embedtrain.data.types import Example
from embedtrain.evaluation.mining.choose import choose, reference, threshold
from embedtrain.evaluation.mining.figures import Figures, Suspect
from embedtrain.evaluation.mining.prepared import Prepared
from embedtrain.evaluation.mining.relation import Whole
from embedtrain.evaluation.mining.window import Floats
from embedtrain.evaluation.mining.written import Negatives, line_of


@dataclass(frozen=True, kw_only=True)
class FoundRow:
    """What was found for one row.

    Attributes:
        row: itself.
        question: the key of what it asks.
        answers: int64 [A], its positives and those of all rows that ask the same.
        answer_scores: float32 [A].
        answer_ranks: int64 [A], candidates that come before each.
        own: int64 [O].
        own_scores: float32 [O].
        candidates: int64 [C], best first by the model that found them.
        scores: float32 [C]; the teacher's, where there is one.
    """

    row: Example
    question: int
    answers: Whole
    answer_scores: Floats
    answer_ranks: Whole
    own: Whole
    own_scores: Floats
    candidates: Whole
    scores: Floats


@dataclass(frozen=True, slots=True)
class MinedRow:
    """What is written of a row, and what is told."""

    line: str
    figures: Figures


def mine_row(found: FoundRow, prepared: Prepared, options: MineOptions, name: str, source: int) -> MinedRow:
    """Choose a row's negatives.

    Args:
        found: for it.
        prepared: of all rows.
        options: of the door.
        name: of the row's source.
        source: its number.
    """
    pool, row = prepared.pool, found.row
    nearest = reference(found.answer_scores, options.against)
    positive = float(found.answer_scores[nearest])
    taken = np.isin(found.candidates, found.own)
    chosen = choose(found.scores, pool.keys[found.candidates], positive, len(found.own), taken, found.question, options)
    negatives = np.concatenate([found.own, found.candidates[chosen]])
    scores = np.concatenate([found.own_scores, found.scores[chosen]])
    mine = [int(np.flatnonzero(found.answers == number)[0]) for number in _numbers(prepared, row)]
    of_positives = found.answer_scores[mine]
    ids = prepared.ids[source]
    names = [] if ids is None else [ids.of(number) for number in negatives.tolist()]
    line = line_of(
        row,
        Negatives(
            [pool[number] for number in negatives.tolist()],
            names if any(names) else [],
        ),
        (of_positives.tolist(), scores.tolist()) if options.scores else None,
    )
    most = threshold(positive, options)
    best = int(found.scores.argmax()) if len(found.scores) else -1
    is_near = best >= 0 and float(found.scores[best]) > min(positive, most)
    ranks = found.answer_ranks[mine]
    lost = [place for place, rank in zip(mine, ranks.tolist(), strict=True) if rank >= options.rank_max]

    def suspect(answer: int, candidate: int) -> Suspect:
        return Suspect(
            source=name,
            place=f"{row.file}:{row.line}",
            query=row.query,
            positive=pool[int(found.answers[answer])],
            positive_score=float(found.answer_scores[answer]),
            document=pool[int(found.candidates[candidate])],
            score=float(found.scores[candidate]),
        )

    figures = Figures(
        negatives=np.array([len(negatives)]),
        positive_scores=of_positives,
        negative_scores=scores,
        positive_ranks=ranks[ranks < options.rank_max] + 1,
        negative_ranks=chosen + 1,
        num_candidates=len(found.candidates),
        num_above_margin=int((found.scores.astype(np.float64) > most).sum()),
        num_above_positive=int((found.scores > np.float32(positive)).sum()),
        num_lost=len(lost),
        # One of each row: twenty from one bad row would say nothing of the others.
        false_negatives=[suspect(nearest, best)] if is_near else [],
        wrong_labels=[suspect(min(lost, key=lambda place: found.answer_scores[place]), best)] if lost else [],
    )
    return MinedRow(line, figures)


def _numbers(prepared: Prepared, row: Example) -> list[int]:
    numbers: list[int] = prepared.pool.numbers(text_keys(row.positives).numpy()).tolist()
    return numbers
