"""Mining: block by block each row's candidates are found, scored, and the negatives among them chosen and written.

Q rows of a block, C candidates of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedtrain.config.mining import MineOptions
from embedtrain.data.keys import asked, text_keys
from embedtrain.data.types import Example
from embedtrain.distributed.world import World
from embedtrain.evaluation.encode import SentenceEncoder
from embedtrain.evaluation.exact import unit_vectors
from embedtrain.evaluation.mining.blocks import Block, blocks_of
from embedtrain.evaluation.mining.documents import Told
from embedtrain.evaluation.mining.figures import Figures
from embedtrain.evaluation.mining.indexed import indexed
from embedtrain.evaluation.mining.prepared import Prepared
from embedtrain.evaluation.mining.relation import Whole
from embedtrain.evaluation.mining.row import FoundRow, MinedRow, mine_row
from embedtrain.evaluation.mining.sources import MinedSource
from embedtrain.evaluation.mining.teacher import Teacher
from embedtrain.evaluation.mining.window import Floats, Pairs, find_window, ranks_of, scores_of
from embedtrain.evaluation.mining.work import Work
from embedtrain.evaluation.search import ShardedIndex
from embedtrain.evaluation.stored_vectors import StoredVectors


@dataclass(frozen=True)
class Miner:
    """Everything that is needed.

    Attributes:
        sources: what is mined.
        prepared: of all their rows.
        encoder: of the model that finds candidates.
        stored: where its vectors are kept on disk.
        teacher: whose scores count; None: the model's own.
        work: where rows are written.
        options: of the door.
    """

    sources: Sequence[MinedSource]
    prepared: Prepared
    encoder: SentenceEncoder
    stored: StoredVectors
    teacher: Teacher | None
    work: Work
    options: MineOptions

    @property
    def world(self) -> World:
        """The ranks."""
        return self.work.world

    def mine(self, told: Told) -> None:
        """Mine every block that is not done yet. A collective.

        Args:
            told: called with what is mined, how many rows are done, and of how many.

        Raises:
            TrainingError: on every rank, if a vector or a score is not finite.
        """
        blocks = blocks_of(self.prepared.wording_of, self.options.queries_at_a_time)
        total, done = sum(len(block.rows) for block in blocks), 0
        is_ready = self.teacher is None
        for number, wording in enumerate(self.prepared.wordings):
            left = [block for block in blocks if block.wording == number]
            done += sum(len(block.rows) for block in left if self.work.has(block.name))
            left = [block for block in left if not self.work.has(block.name)]
            if not left:
                continue
            if self.teacher is not None and not is_ready:
                self.teacher.prepare(self.prepared.pool, self.work.vectors, told)
                is_ready = True
            texts = self.prepared.pool.seen_as(wording)
            index = indexed(self.encoder, texts, wording.max_length, self.options.index, self.stored, told)
            for block in left:
                self._mine_block(block, index)
                done += len(block.rows)
                told("mining rows", done, total)

    def _mine_block(self, block: Block, index: ShardedIndex) -> None:
        source = self.sources[block.source]
        with self.world.together("reading rows to mine"):
            rows = [source.store[row] for row in block.rows.tolist()]
            questions = text_keys([asked(row.query, row.instruction) for row in rows]).numpy()
            answers = Pairs(*self.prepared.answers.of(questions))
            own = self._own(rows, questions) if self.options.keep_own_negatives else _nothing()
            excluded = self._excluded(rows, questions)
        texts = [source.query(row) for row in rows]
        queries = unit_vectors(self.encoder.encode_all(texts, max_length=source.query_max_length))
        window = find_window(index, queries, excluded, self.options.rank_max)
        scores = scores_of(index, queries, answers)
        ranks = ranks_of(window, answers, scores)
        candidates = window.pairs()
        of_candidates = window.scores[window.documents >= 0]
        of_own = np.empty(0, dtype=np.float32)
        if self.teacher is not None:
            plain = [row.query for row in rows]
            scores, of_own, of_candidates = _together(self.teacher, plain, [answers, own, candidates])
        elif self.options.keep_own_negatives:
            of_own = scores_of(index, queries, own)
        mined: list[MinedRow] = []
        edges = [len(rows) * rank // self.world.size for rank in range(self.world.size + 1)]
        with self.world.together("choosing negatives"):
            for place in range(edges[self.world.rank], edges[self.world.rank + 1]):
                some, its, kept = candidates.of(place), answers.of(place), own.of(place)
                found = FoundRow(
                    row=rows[place],
                    question=int(questions[place]),
                    answers=answers.documents[its],
                    answer_scores=scores[its],
                    answer_ranks=ranks[its],
                    own=own.documents[kept],
                    own_scores=of_own[kept],
                    candidates=candidates.documents[some],
                    scores=of_candidates[some],
                )
                mined.append(mine_row(found, self.prepared, self.options, source.name, block.source))
        figures = Figures.joined([row.figures for row in mined])
        self.work.write(block.name, [row.line for row in mined], figures)

    def _own(self, rows: Sequence[Example], questions: Whole) -> Pairs:
        """The hard negatives that rows have already, without those that are no negatives."""
        counts = [len(row.negatives) for row in rows]
        pool = self.prepared.pool
        owners = np.repeat(np.arange(len(rows)), counts)
        documents = pool.numbers(text_keys([text for row in rows for text in row.negatives]).numpy())
        struck = Pairs(*self.prepared.no_negatives.of(questions))
        stays = ~np.isin(owners * len(pool) + documents, struck.owners * len(pool) + struck.documents)
        return Pairs(owners[stays], documents[stays])

    def _excluded(self, rows: Sequence[Example], questions: Whole) -> Pairs:
        """The documents that are no negatives of each row: what answers an equal query, and the query itself."""
        struck = Pairs(*self.prepared.no_negatives.of(questions))
        itself = self.prepared.pool.numbers(text_keys([row.query for row in rows]).numpy())
        there = np.flatnonzero(itself >= 0)
        size = len(self.prepared.pool)
        cells = np.unique(
            np.concatenate([struck.owners * size + struck.documents, there * size + itself[there]]).astype(np.int64)
        )
        return Pairs(cells // size, cells % size)


def _together(teacher: Teacher, queries: Sequence[str], kinds: Sequence[Pairs]) -> list[Floats]:
    """The teacher's scores of several kinds of pairs, asked for once. A collective."""
    owners = np.concatenate([pairs.owners for pairs in kinds])
    documents = np.concatenate([pairs.documents for pairs in kinds])
    order = np.argsort(owners, kind="stable")
    scores: Floats = np.empty(len(owners), dtype=np.float32)
    scores[order] = teacher.scores(queries, Pairs(owners[order], documents[order]))
    return np.split(scores, np.cumsum([len(pairs.owners) for pairs in kinds])[:-1])


def _nothing() -> Pairs:
    return Pairs(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
