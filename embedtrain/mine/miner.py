"""Mining: block by block each question's candidates are found and scored, and each row's negatives chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.mine.blocks import RowBlock, row_blocks
from embedtrain.mine.documents import ProgressCallback
from embedtrain.mine.figures import MiningStats
from embedtrain.mine.indexed import indexed
from embedtrain.mine.options import MineOptions
from embedtrain.mine.prepared import MiningInputs
from embedtrain.mine.questions import BlockCandidates, QueryCandidates, UniqueQueries
from embedtrain.mine.row import MinedRow, RowCandidates, mine_row
from embedtrain.mine.sources import MiningSource
from embedtrain.mine.teacher import Teacher
from embedtrain.mine.window import FloatArray, QueryDocumentPairs, find_window, ranks_of, scores_of
from embedtrain.mine.work import MiningFolder


@dataclass(frozen=True)
class Miner:
    """Everything that is needed.

    Attributes:
        sources: what is mined.
        prepared: of all their rows.
        encoder: of the model that finds candidates.
        vector_cache: where its vectors are kept on disk.
        teacher: whose scores count; None: the model's own.
        work: where rows are written.
        options: of the door.
    """

    sources: Sequence[MiningSource]
    prepared: MiningInputs
    encoder: SentenceEncoder
    vector_cache: VectorCache
    teacher: Teacher | None
    work: MiningFolder
    options: MineOptions

    @property
    def world(self) -> World:
        """The ranks."""
        return self.work.world

    def mine(self, progress: ProgressCallback) -> None:
        """Mine every block that is not done yet. A collective.

        Args:
            progress: called with what is mined, how many rows are done, and of how many.

        Raises:
            TrainingError: on every rank, if a vector or a score is not finite.
        """
        blocks = row_blocks(self.prepared.format_of, self.options.query_batch_size)
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
                with explain_lost_contact("encoding documents by the teacher"):
                    self.teacher.prepare(self.prepared.pool, self.work.vectors, progress)
                is_ready = True
            texts = self.prepared.pool.formatted(wording)
            with explain_lost_contact("encoding documents to find negatives among"):
                index = indexed(
                    self.encoder,
                    texts,
                    wording.max_length,
                    self.options.index,
                    self.vector_cache,
                    progress,
                    prompt=wording.before,
                )
            for block in left:
                with explain_lost_contact(f"mining {self.sources[block.source].name}"):
                    self._mine_block(block, index, progress)
                done += len(block.rows)
                progress("mining rows", done, total)

    def _mine_block(self, block: RowBlock, index: ShardedIndex, progress: ProgressCallback) -> None:
        source = self.sources[block.source]
        with self.world.fail_together("reading rows to mine"):
            rows = [source.store[row] for row in block.rows.tolist()]
            questions = UniqueQueries.of(rows, source, self.prepared, keep_own=self.options.keep_existing_negatives)
        found = self._find(questions, source.text_format.query_max_length, index, progress)
        mined: list[MinedRow] = []
        edges = [len(rows) * rank // self.world.size for rank in range(self.world.size + 1)]
        with self.world.fail_together("choosing negatives"):
            known: dict[int, QueryCandidates] = {}
            for place in range(edges[self.world.rank], edges[self.world.rank + 1]):
                number = int(questions.of_row[place])
                if number not in known:
                    known[number] = found.question(number, self.options)
                own = questions.own.documents[questions.own.of(place)]
                of_row = RowCandidates(rows[place], known[number], own)
                mined.append(mine_row(of_row, self.prepared, self.options, source.name, block.source))
        figures = MiningStats.joined([row.figures for row in mined])
        self.work.write(block.name, [row.line for row in mined], figures)

    def _find(
        self, questions: UniqueQueries, max_length: int | None, index: ShardedIndex, progress: ProgressCallback
    ) -> BlockCandidates:
        queries = unit_vectors(
            self.encoder.encode_all(questions.seen, max_length=max_length, existing_prompt=questions.prompts)
        )
        window = find_window(index, queries, questions.excluded, self.options.rank_max)
        answer_scores = scores_of(index, queries, questions.answers)
        ranks = ranks_of(window, questions.answers, answer_scores)
        candidates, scores = window.pairs(), window.scores[window.documents >= 0]
        if self.teacher is not None:
            kinds = [questions.answers, questions.own_pairs, candidates]
            answer_scores, own_scores, scores = _together(self.teacher, questions.texts, kinds, progress)
        else:
            own_scores = scores_of(index, queries, questions.own_pairs)
        return BlockCandidates(
            questions=questions,
            candidates=candidates,
            scores=scores,
            answer_scores=answer_scores,
            answer_ranks=ranks,
            own_scores=own_scores,
        )


def _together(
    teacher: Teacher, queries: Sequence[str], kinds: Sequence[QueryDocumentPairs], progress: ProgressCallback
) -> list[FloatArray]:
    """The teacher's scores of several kinds of pairs, asked for once. A collective."""
    owners = np.concatenate([pairs.owners for pairs in kinds])
    documents = np.concatenate([pairs.documents for pairs in kinds])
    order = np.argsort(owners, kind="stable")
    scores: FloatArray = np.empty(len(owners), dtype=np.float32)
    scores[order] = teacher.scores(queries, QueryDocumentPairs(owners[order], documents[order]), progress)
    return np.split(scores, np.cumsum([len(pairs.owners) for pairs in kinds])[:-1])
