"""The distinct questions of a block, each searched and scored once however many rows ask it, and what was found for it.

Q rows, U distinct questions, O negatives that rows have already; of one question C candidates and A answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from embedtrain.data.keys import asked, text_keys
from embedtrain.data.types import Example
from embedtrain.mine.choose import reference
from embedtrain.mine.options import MineOptions
from embedtrain.mine.pool import stripped_keys
from embedtrain.mine.prepared import MiningInputs
from embedtrain.mine.relation import IntArray, distinct_pairs
from embedtrain.mine.sources import MiningSource
from embedtrain.mine.window import FloatArray, QueryDocumentPairs


@dataclass(frozen=True, kw_only=True)
class UniqueQueries:
    """What the rows of a block ask: rows that look the same to the model and to the teacher ask the same.

    Attributes:
        of_row: int64 [Q], the question of each row.
        texts: of each question, without prompt.
        seen: likewise, as the model sees it.
        prompts: what each of these begins with that is a prompt.
        keys: int64 [U], see `asked`.
        answers: of each question, the positives of all rows that ask it.
        excluded: of each question, the documents that are no negatives of it.
        own: the negatives that rows have already and keep, by row and in its order; without those that are excluded.
        own_pairs: these by question, each once.
    """

    of_row: IntArray
    texts: Sequence[str]
    seen: Sequence[str]
    prompts: Sequence[str]
    keys: IntArray
    answers: QueryDocumentPairs
    excluded: QueryDocumentPairs
    own: QueryDocumentPairs
    own_pairs: QueryDocumentPairs

    @classmethod
    def of(cls, rows: Sequence[Example], source: MiningSource, prepared: MiningInputs, *, keep_own: bool) -> Self:
        """Of some rows of a source."""
        number_of: dict[tuple[str, str, str], int] = {}
        texts: list[str] = []
        of_row: IntArray = np.empty(len(rows), dtype=np.int64)
        for place, row in enumerate(rows):
            number = number_of.setdefault((asked(row.query, row.instruction), *source.query(row)), len(number_of))
            if number == len(texts):
                texts.append(row.query)
            of_row[place] = number
        keys = text_keys([key for key, _, _ in number_of]).numpy()
        excluded = QueryDocumentPairs(*prepared.not_negatives.of(stripped_keys(texts)))
        own = _own(rows, of_row, excluded, prepared) if keep_own else QueryDocumentPairs(_none(), _none())
        return cls(
            of_row=of_row,
            texts=texts,
            seen=[seen for _, seen, _ in number_of],
            prompts=[prompt for _, _, prompt in number_of],
            keys=keys,
            answers=QueryDocumentPairs(*prepared.answers.of(keys)),
            excluded=excluded,
            own=own,
            own_pairs=QueryDocumentPairs(*distinct_pairs(of_row[own.owners], own.documents)),
        )


def _own(
    rows: Sequence[Example], of_row: IntArray, excluded: QueryDocumentPairs, prepared: MiningInputs
) -> QueryDocumentPairs:
    counts = [len(row.negatives) for row in rows]
    owners: IntArray = np.repeat(np.arange(len(rows)), counts)
    documents = prepared.pool.numbers(text_keys([text for row in rows for text in row.negatives]).numpy())
    size = len(prepared.pool)
    stays = ~np.isin(of_row[owners] * size + documents, excluded.owners * size + excluded.documents)
    # Two that differ by blanks at their ends are one negative.
    bare = prepared.pool.stripped_keys[documents]
    order = np.lexsort((np.arange(len(bare)), bare, owners))
    again = (np.diff(owners[order]) == 0) & (np.diff(bare[order]) == 0)
    stays[order[1:][again]] = False
    return QueryDocumentPairs(owners[stays], documents[stays])


def _none() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class QueryCandidates:
    """What was found for one question.

    Attributes:
        key: of what is asked.
        answers: int64 [A], ascending.
        answer_scores: float32 [A].
        answer_ranks: int64 [A], candidates that come before each.
        reference: which of the answers margins are taken from.
        own: int64 [n], negatives that any of its rows keeps, ascending.
        own_scores: float32 [n].
        candidates: int64 [C], best first by the model that found them.
        scores: float32 [C]; the teacher's, where there is one.
    """

    key: int
    answers: IntArray
    answer_scores: FloatArray
    answer_ranks: IntArray
    reference: int
    own: IntArray
    own_scores: FloatArray
    candidates: IntArray
    scores: FloatArray

    @property
    def positive(self) -> float:
        """The score that margins are taken from."""
        return float(self.answer_scores[self.reference])


@dataclass(frozen=True, kw_only=True)
class BlockCandidates:
    """What was found for all questions of a block: scores are in the order of the pairs.

    Attributes:
        questions: of the block.
        candidates: of each question, best first.
        scores: float32, of candidates; the teacher's, where there is one.
        answer_scores: float32, likewise of answers.
        answer_ranks: int64, candidates that come before each answer.
        own_scores: float32, of `own_pairs`.
    """

    questions: UniqueQueries
    candidates: QueryDocumentPairs
    scores: FloatArray
    answer_scores: FloatArray
    answer_ranks: IntArray
    own_scores: FloatArray

    def question(self, number: int, options: MineOptions) -> QueryCandidates:
        """One of them."""
        of = self.questions
        some, its, kept = self.candidates.of(number), of.answers.of(number), of.own_pairs.of(number)
        return QueryCandidates(
            key=int(of.keys[number]),
            answers=of.answers.documents[its],
            answer_scores=self.answer_scores[its],
            answer_ranks=self.answer_ranks[its],
            reference=reference(self.answer_scores[its], options.margin_reference),
            own=of.own_pairs.documents[kept],
            own_scores=self.own_scores[kept],
            candidates=self.candidates.documents[some],
            scores=self.scores[some],
        )
