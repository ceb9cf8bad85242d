"""Mining: block by block, finds and scores the candidates of each query, and chooses the negatives of each row.

R is the number of rows of a source.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embedtrain.distributed.world import explain_lost_contact
from embedtrain.errors import DataError
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.mine.candidates import (
    BlockCandidates,
    FloatArray,
    QueryCandidates,
    QueryDocumentPairs,
    UniqueQueries,
    find_window,
    ranks_of,
    scores_of,
)
from embedtrain.mine.folder import MiningFolder
from embedtrain.mine.inputs import MiningInputs
from embedtrain.mine.multimap import IntArray
from embedtrain.mine.negatives import MinedRow, RowToMine, mine_row
from embedtrain.mine.options import MineOptions
from embedtrain.mine.sources import DocumentFormat, MiningSource
from embedtrain.mine.stats import MiningStats
from embedtrain.mine.teacher import Teacher


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one source with one document format, which are mined and written together.

    Attributes:
        source: its number.
        format: number of the document format.
        number: of the block, from 0, among those of its source and format.
        rows: int64, ascending.
    """

    source: int
    format: int
    number: int
    rows: IntArray

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.source:05}-{self.format:05}-{self.number:07}"


def row_blocks(format_of: Sequence[IntArray], size: int) -> list[RowBlock]:
    """Cut the rows of all sources into blocks.

    Args:
        format_of: for each source, int64 [R], the document format of each row.
        size: maximum number of rows of a block.
    """
    blocks: list[RowBlock] = []
    for source, formats in enumerate(format_of):
        for document_format in np.unique(formats).tolist():
            rows = np.flatnonzero(formats == document_format)
            for number, start in enumerate(range(0, len(rows), size)):
                blocks.append(RowBlock(source, document_format, number, rows[start : start + size]))
    return blocks


def merge_in_row_order(formats: IntArray, lines: dict[int, Iterator[str]]) -> Iterator[str]:
    """The lines of a source in the order of its rows.

    Args:
        formats: int64 [R], the document format of each row.
        lines: those of the rows of each document format.

    Raises:
        DataError: there are fewer lines than rows.
    """
    for done, document_format in enumerate(formats.tolist()):
        line = next(lines[document_format], None)
        if line is None:
            raise DataError(
                f"mined rows are missing after the first {done:,} of {len(formats):,}: delete .mining in output_dir, "
                "and mine again"
            )
        yield line


@dataclass(frozen=True)
class Miner:
    """Mines all sources.

    Attributes:
        sources: to mine.
        inputs: of all their rows.
        encoder: of the model that finds candidates.
        vector_cache: of the model's document vectors.
        teacher: provides the scores; None: the model does.
        folder: receives the mined rows.
        options: of the command.
    """

    sources: Sequence[MiningSource]
    inputs: MiningInputs
    encoder: SentenceEncoder
    vector_cache: VectorCache
    teacher: Teacher | None
    folder: MiningFolder
    options: MineOptions

    def mine(self, progress: ProgressCallback) -> None:
        """Mine every block that is not finished yet. A collective.

        Raises:
            TrainingError: on every rank, if a vector or a score is not finite.
        """
        blocks = row_blocks(self.inputs.format_of, self.options.query_batch_size)
        finished = self.folder.finished_blocks()
        total = sum(len(block.rows) for block in blocks)
        done = sum(len(block.rows) for block in blocks if block.name in finished)
        teacher_is_ready = self.teacher is None
        for number, document_format in enumerate(self.inputs.formats):
            remaining = [block for block in blocks if block.format == number and block.name not in finished]
            if not remaining:
                continue
            if self.teacher is not None and not teacher_is_ready:
                with explain_lost_contact("encoding documents with the teacher"):
                    self.teacher.prepare(self.inputs.pool, self.folder.vectors, progress)
                teacher_is_ready = True
            with explain_lost_contact("encoding documents"):
                index = self._index(document_format, progress)
            for block in remaining:
                with explain_lost_contact(f"mining {self.sources[block.source].name}"):
                    self._mine_block(block, index, progress)
                done += len(block.rows)
                progress("mining rows", done, total)

    def _index(self, document_format: DocumentFormat, progress: ProgressCallback) -> ShardedIndex:
        pool = self.inputs.pool
        index = ShardedIndex(first_added_order(len(pool)), self.encoder.world, self.options.index)
        with self.encoder.report_progress(progress):
            index.add_texts(
                self.encoder,
                pool.formatted(document_format),
                max_length=document_format.max_length,
                vector_cache=self.vector_cache,
                existing_prompt=document_format.before,
            )
        return index

    def _mine_block(self, block: RowBlock, index: ShardedIndex, progress: ProgressCallback) -> None:
        world, source = self.folder.world, self.sources[block.source]
        with world.fail_together("reading rows to mine"):
            rows = [source.store[row] for row in block.rows.tolist()]
            keep_existing = self.options.keep_existing_negatives
            queries = UniqueQueries.of(rows, source, self.inputs, keep_existing=keep_existing)
        candidates = self._find_candidates(queries, source.text_format.query_max_length, index, progress)
        mined: list[MinedRow] = []
        edges = [len(rows) * rank // world.size for rank in range(world.size + 1)]
        with world.fail_together("choosing negatives"):
            by_query: dict[int, QueryCandidates] = {}
            for row in range(edges[world.rank], edges[world.rank + 1]):
                query = int(queries.of_row[row])
                if query not in by_query:
                    by_query[query] = candidates.of_query(query, self.options)
                existing = queries.existing.documents[queries.existing.slice_of(row)]
                target = RowToMine(rows[row], block.source, source.name, existing)
                mined.append(mine_row(target, by_query[query], self.inputs, self.options))
        stats = MiningStats.merge([row.stats for row in mined])
        self.folder.write_block(block.name, [row.line for row in mined], stats)

    def _find_candidates(
        self, queries: UniqueQueries, max_length: int | None, index: ShardedIndex, progress: ProgressCallback
    ) -> BlockCandidates:
        vectors = self.encoder.encode_all(queries.inputs, max_length=max_length, existing_prompt=queries.prompts)
        vectors = unit_vectors(vectors)
        window = find_window(index, vectors, queries.excluded, self.options.rank_max)
        answer_scores = scores_of(index, vectors, queries.answers)
        ranks = ranks_of(window, queries.answers, answer_scores)
        candidates, scores = window.pairs(), window.scores[window.documents >= 0]
        if self.teacher is not None:
            groups = [queries.answers, queries.existing_pairs, candidates]
            answer_scores, existing_scores, scores = _teacher_scores(self.teacher, queries.texts, groups, progress)
        else:
            existing_scores = scores_of(index, vectors, queries.existing_pairs)
        return BlockCandidates(
            queries=queries,
            candidates=candidates,
            scores=scores,
            answer_scores=answer_scores,
            answer_ranks=ranks,
            existing_scores=existing_scores,
        )

    def finish(self) -> dict[str, Any]:
        """Merge the blocks of each source into its file, write the summary, and delete the blocks. A collective.

        Returns:
            The summary, on every rank: statistics of each source, and the most suspicious labels of all.
        """
        world = self.folder.world
        blocks = row_blocks(self.inputs.format_of, self.options.query_batch_size)
        summary: dict[str, Any] = {}
        # On one rank only: a network file system may show the files of other ranks with delay.
        with world.fail_together("writing mined files"):
            if world.is_main:
                for number, source in enumerate(self.sources):
                    source_blocks = [block for block in blocks if block.source == number]
                    lines = {
                        each: self.folder.read_lines([block.name for block in source_blocks if block.format == each])
                        for each in {block.format for block in source_blocks}
                    }
                    self.folder.write_source(source.name, merge_in_row_order(self.inputs.format_of[number], lines))
        with world.fail_together("writing the summary"):
            if world.is_main:
                summary = self._summary(blocks)
                self.folder.finish(summary)
        return world.broadcast(summary)

    def _summary(self, blocks: Sequence[RowBlock]) -> dict[str, Any]:
        stats_by_source = {
            source.name: self.folder.read_stats([block.name for block in blocks if block.source == number])
            for number, source in enumerate(self.sources)
        }
        total = MiningStats.merge(list(stats_by_source.values()))
        return {
            "documents": len(self.inputs.pool),
            "negatives_wanted": self.options.negatives,
            "rank_max": self.options.rank_max,
            "sources": {
                name: {"file": f"{name}.jsonl", **stats.summary(self.options.negatives)}
                for name, stats in stats_by_source.items()
            },
            "suspected_false_negatives": [vars(suspect) for suspect in total.false_negatives],
            "suspected_wrong_labels": [vars(suspect) for suspect in total.wrong_labels],
        }


def _teacher_scores(
    teacher: Teacher, queries: Sequence[str], groups: Sequence[QueryDocumentPairs], progress: ProgressCallback
) -> list[FloatArray]:
    """The teacher's scores of several groups of pairs, in a single call. A collective."""
    owners = np.concatenate([pairs.owners for pairs in groups])
    documents = np.concatenate([pairs.documents for pairs in groups])
    order = np.argsort(owners, kind="stable")
    scores: FloatArray = np.empty(len(owners), dtype=np.float32)
    scores[order] = teacher.scores(queries, QueryDocumentPairs(owners[order], documents[order]), progress)
    return np.split(scores, np.cumsum([len(pairs.owners) for pairs in groups])[:-1])
