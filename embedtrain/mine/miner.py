"""Mining: block by block each question's candidates are found and scored, and each row's negatives chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedtrain.distributed.world import World, doing
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex
from embedtrain.inference.vector_cache import StoredVectors
from embedtrain.mine.blocks import Block, blocks_of
from embedtrain.mine.documents import Told
from embedtrain.mine.figures import Figures
from embedtrain.mine.indexed import indexed
from embedtrain.mine.options import MineOptions
from embedtrain.mine.prepared import Prepared
from embedtrain.mine.questions import Found, FoundQuestion, Questions
from embedtrain.mine.row import FoundRow, MinedRow, mine_row
from embedtrain.mine.sources import MinedSource
from embedtrain.mine.teacher import Teacher
from embedtrain.mine.window import Floats, Pairs, find_window, ranks_of, scores_of
from embedtrain.mine.work import Work


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
        blocks = blocks_of(self.prepared.wording_of, self.options.query_batch_size)
        all_done = self.work.done()
        total, done = sum(len(block.rows) for block in blocks), 0
        is_ready = self.teacher is None
        for number, wording in enumerate(self.prepared.wordings):
            here = [block for block in blocks if block.wording == number]
            left = [block for block in here if block.name not in all_done]
            done += sum(len(block.rows) for block in here) - sum(len(block.rows) for block in left)
            if not left:
                continue
            if self.teacher is not None and not is_ready:
                with doing("encoding documents by the teacher"):
                    self.teacher.prepare(self.prepared.pool, self.work.vectors, told)
                is_ready = True
            texts = self.prepared.pool.seen_as(wording)
            with doing("encoding documents to find negatives among"):
                index = indexed(
                    self.encoder,
                    texts,
                    wording.max_length,
                    self.options.index,
                    self.stored,
                    told,
                    prompt=wording.before,
                )
            for block in left:
                with doing(f"mining {self.sources[block.source].name}"):
                    self._mine_block(block, index, told)
                done += len(block.rows)
                told("mining rows", done, total)

    def _mine_block(self, block: Block, index: ShardedIndex, told: Told) -> None:
        source = self.sources[block.source]
        with self.world.together("reading rows to mine"):
            rows = [source.store[row] for row in block.rows.tolist()]
            questions = Questions.of(rows, source, self.prepared, keep_own=self.options.keep_existing_negatives)
        found = self._find(questions, source.query_max_length, index, told)
        mined: list[MinedRow] = []
        edges = [len(rows) * rank // self.world.size for rank in range(self.world.size + 1)]
        with self.world.together("choosing negatives"):
            known: dict[int, FoundQuestion] = {}
            for place in range(edges[self.world.rank], edges[self.world.rank + 1]):
                number = int(questions.of_row[place])
                if number not in known:
                    known[number] = found.question(number, self.options)
                own = questions.own.documents[questions.own.of(place)]
                of_row = FoundRow(rows[place], known[number], own)
                mined.append(mine_row(of_row, self.prepared, self.options, source.name, block.source))
        figures = Figures.joined([row.figures for row in mined])
        self.work.write(block.name, [row.line for row in mined], figures)

    def _find(self, questions: Questions, max_length: int | None, index: ShardedIndex, told: Told) -> Found:
        queries = unit_vectors(self.encoder.encode_all(questions.seen, max_length=max_length, within=questions.prompts))
        window = find_window(index, queries, questions.excluded, self.options.rank_max)
        answer_scores = scores_of(index, queries, questions.answers)
        ranks = ranks_of(window, questions.answers, answer_scores)
        candidates, scores = window.pairs(), window.scores[window.documents >= 0]
        if self.teacher is not None:
            kinds = [questions.answers, questions.own_pairs, candidates]
            answer_scores, own_scores, scores = _together(self.teacher, questions.texts, kinds, told)
        else:
            own_scores = scores_of(index, queries, questions.own_pairs)
        return Found(
            questions=questions,
            candidates=candidates,
            scores=scores,
            answer_scores=answer_scores,
            answer_ranks=ranks,
            own_scores=own_scores,
        )


def _together(teacher: Teacher, queries: Sequence[str], kinds: Sequence[Pairs], told: Told) -> list[Floats]:
    """The teacher's scores of several kinds of pairs, asked for once. A collective."""
    owners = np.concatenate([pairs.owners for pairs in kinds])
    documents = np.concatenate([pairs.documents for pairs in kinds])
    order = np.argsort(owners, kind="stable")
    scores: Floats = np.empty(len(owners), dtype=np.float32)
    scores[order] = teacher.scores(queries, Pairs(owners[order], documents[order]), told)
    return np.split(scores, np.cumsum([len(pairs.owners) for pairs in kinds])[:-1])
