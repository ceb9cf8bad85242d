"""Mining: block by block, finds and scores the candidates of each query, and chooses the negatives of each row.

Shapes: R rows of a source, C candidates of a query.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedtrain.commands.mine.stats import MiningStats, SuspectedLabel
from embedtrain.data.rows import Example, format_row, text_keys
from embedtrain.data.sampling.permutation import Purpose, make_key, random_bits
from embedtrain.data.sources.pictures import shown_item, written_item
from embedtrain.distributed.world import explain_lost_contact
from embedtrain.errors import DataError
from embedtrain.inference.encode import ProgressCallback
from embedtrain.inference.index import ShardedIndex
from embedtrain.losses.encoded import Part
from embedtrain.mining.folder import MiningFolder
from embedtrain.mining.inputs import (
    FloatArray,
    MiningInputs,
    QueryDocumentPairs,
    RowBlock,
    UniqueQueries,
    group_by_depth,
    row_blocks,
    scores_of,
)
from embedtrain.mining.pool import IntArray
from embedtrain.mining.run import RowSearch
from embedtrain.mining.teacher import Teacher

if TYPE_CHECKING:
    from embedtrain.commands.mine import MineOptions


@dataclass(frozen=True, kw_only=True)
class QueryCandidates:
    """The candidates of one query, its answers, and the scores of both.

    Scores are the teacher's if there is one; the order of the candidates is always the model's.
    """

    key: int  # of query and instruction
    answers: IntArray  # [A], ascending
    answer_scores: FloatArray  # [A]
    answer_ranks: IntArray  # [A], the number of candidates ranked before each answer
    reference: int  # index of the answer that margins refer to
    existing: IntArray  # [n], negatives that any row of this query keeps, ascending
    existing_scores: FloatArray  # [n]
    candidates: IntArray  # [C], best first
    scores: FloatArray  # [C], of the candidates
    logits: bool  # whether scores are logits of a probability, instead of similarities

    @property
    def reference_score(self) -> float:
        """The score of the positive that margins refer to."""
        return float(self.answer_scores[self.reference])


@dataclass(frozen=True, kw_only=True)
class BlockCandidates:
    """The candidates of all queries of a block, with one score per pair."""

    queries: UniqueQueries
    candidates: QueryDocumentPairs  # by query, best first by the model
    scores: FloatArray  # of `candidates`; the teacher's if there is one
    answer_scores: FloatArray  # of `queries.answers`
    answer_ranks: IntArray  # the number of candidates ranked before each answer
    existing_scores: FloatArray  # of `queries.existing_pairs`
    logits: bool  # whether scores are logits of a probability, instead of similarities

    def of_query(self, number: int, options: "MineOptions") -> QueryCandidates:
        """The candidates of one query."""
        queries = self.queries
        candidates = self.candidates.slice_of(number)
        answers = queries.answers.slice_of(number)
        existing = queries.existing_pairs.slice_of(number)
        answer_scores = self.answer_scores[answers]
        lowest = options.margin_reference.is_lowest
        return QueryCandidates(
            key=int(queries.keys[number]),
            answers=queries.answers.documents[answers],
            answer_scores=answer_scores,
            answer_ranks=self.answer_ranks[answers],
            reference=int(answer_scores.argmin() if lowest else answer_scores.argmax()),
            existing=queries.existing_pairs.documents[existing],
            existing_scores=self.existing_scores[existing],
            candidates=self.candidates.documents[candidates],
            scores=self.scores[candidates],
            logits=self.logits,
        )


@dataclass(frozen=True, slots=True)
class CandidateWindow:
    """The best candidates of each query, best first; equal scores in the order of the pool."""

    documents: IntArray  # [Q, C]; -1 where a query has fewer candidates
    scores: FloatArray  # [Q, C]; minus infinity there

    def pairs(self) -> tuple[QueryDocumentPairs, FloatArray]:
        """The candidates as pairs, and their scores."""
        rows, columns = np.nonzero(self.documents >= 0)
        return QueryDocumentPairs(rows.astype(np.int64), self.documents[rows, columns]), self.scores[rows, columns]


def find_window(index: ShardedIndex, queries: Part, excluded: QueryDocumentPairs, rank_max: int) -> CandidateWindow:
    """The `rank_max` best documents of each query that are not excluded. A collective.

    sentence-transformers' `mine_hard_negatives` counts ranks alike. But if a positive is beyond the window, it also
    considers further documents, their number being the maximum number of positives of a query; here, the candidates of
    a row do not depend on other queries. `queries` are the same on every rank.
    """
    num_queries, width = len(queries), min(rank_max, index.num_documents)
    documents: IntArray = np.full((num_queries, width), -1, dtype=np.int64)
    scores: FloatArray = np.full((num_queries, width), -np.inf, dtype=np.float32)
    counts = excluded.counts(num_queries)
    excluded_keys = excluded.owners * index.num_documents + excluded.documents
    for group in group_by_depth(counts):
        # Deep enough to fill the window even if all excluded documents rank first.
        ranking = index.search(queries.take(torch.from_numpy(group), group), rank_max + int(counts[group].max()))
        ranked, ranked_scores = ranking.documents.numpy(), ranking.scores.numpy()
        is_excluded = np.isin(group[:, None] * index.num_documents + ranked, excluded_keys)
        order = np.argsort(is_excluded, axis=1, kind="stable")[:, :width]
        is_candidate = ~np.take_along_axis(is_excluded, order, axis=1)
        columns = order.shape[1]
        documents[group, :columns] = np.where(is_candidate, np.take_along_axis(ranked, order, axis=1), -1)
        scores[group, :columns] = np.where(is_candidate, np.take_along_axis(ranked_scores, order, axis=1), -np.inf)
    return CandidateWindow(documents, scores)


def ranks_of(window: CandidateWindow, pairs: QueryDocumentPairs, scores: FloatArray) -> IntArray:
    """The number of candidates ranked before each pair's document, int64 [P]; C if it is beyond the window."""
    ranks: IntArray = np.empty(len(pairs.owners), dtype=np.int64)
    for start in range(0, len(ranks), 4096):
        batch = slice(start, start + 4096)
        candidates, candidate_scores = window.documents[pairs.owners[batch]], window.scores[pairs.owners[batch]]
        score, document = scores[batch, None], pairs.documents[batch, None]
        is_before = (candidate_scores > score) | ((candidate_scores == score) & (candidates < document))
        ranks[batch] = (is_before & (candidates >= 0)).sum(axis=1)
    return ranks


def merge_in_row_order(formats: IntArray, lines: dict[int, Iterator[str]]) -> Iterator[str]:
    """The lines of a source in the order of its rows, whose document formats, [R], are `formats`."""
    for done, document_format in enumerate(formats.tolist()):
        line = next(lines[document_format], None)
        if line is None:
            raise DataError(
                f"mined rows are missing after the first {done:,} of {len(formats):,}: delete .mining in output_dir, "
                "and mine again"
            )
        yield line


class Miner:
    """Mines all sources."""

    def __init__(self, search: RowSearch, options: "MineOptions") -> None:
        self.search, self.options = search, options
        self.sources, self.inputs, self.folder = search.sources, search.inputs, search.folder
        self.encoder, self.teacher = search.encoder, search.teacher

    def mine(self, progress: ProgressCallback) -> None:
        """Mine every block that is not finished yet. A collective."""
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
                index = self.search.index(document_format, progress)
            for block in remaining:
                with explain_lost_contact(f"mining {self.sources[block.source].name}"):
                    self._mine_block(block, index, progress)
                done += len(block.rows)
                progress("mining rows", done, total)

    def _mine_block(self, block: RowBlock, index: ShardedIndex, progress: ProgressCallback) -> None:
        world, source = self.folder.world, self.sources[block.source]
        keep_existing = self.options.keep_existing_negatives
        with world.fail_together("reading rows to mine"):
            rows = [source.store[row] for row in block.rows.tolist()]
            queries = UniqueQueries.of(rows, source, self.inputs, keep_existing=keep_existing)
        candidates = self._find_candidates(queries, source.text_format.query_max_length, index, progress)
        lines: list[str] = []
        stats: list[MiningStats] = []
        local_rows = range(len(rows) * world.rank // world.size, len(rows) * (world.rank + 1) // world.size)
        with world.fail_together("choosing negatives"):
            by_query: dict[int, QueryCandidates] = {}
            for row in local_rows:
                query = int(queries.of_row[row])
                if query not in by_query:
                    by_query[query] = candidates.of_query(query, self.options)
                existing = queries.existing.documents[queries.existing.slice_of(row)]
                target = RowToMine(rows[row], block.source, source.name, existing)
                line, row_stats = mine_row(target, by_query[query], self.inputs, self.options)
                lines.append(line)
                stats.append(row_stats)
        self.folder.write_block(block.name, lambda path: write_mined(path, lines, MiningStats.merge(stats)))

    def _find_candidates(
        self, queries: UniqueQueries, max_length: int | None, index: ShardedIndex, progress: ProgressCallback
    ) -> BlockCandidates:
        encoded = self.encoder.encode(queries.inputs, max_length=max_length, existing_prompt=queries.prompts)
        vectors = self.encoder.score.search_part(encoded)
        window = find_window(index, vectors, queries.excluded, self.options.rank_max)
        answer_scores = scores_of(index, vectors, queries.answers)
        ranks = ranks_of(window, queries.answers, answer_scores)
        candidates, scores = window.pairs()
        if self.options.negatives == 0:  # a teacher scores what is written, and nothing else
            nothing = np.empty(0, dtype=np.int64)
            candidates, scores = QueryDocumentPairs(nothing, nothing), np.empty(0, dtype=np.float32)
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
            logits=self.teacher is not None and self.teacher.scores_are_logits,
        )

    def finish(self) -> dict[str, Any]:
        """Merge the blocks of each source into its file, write the summary, and delete the blocks. A collective.

        Returns the summary on every rank: statistics of each source, and the most suspicious labels of all.
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
                        fmt: read_lines(self.folder, [block.name for block in source_blocks if block.format == fmt])
                        for fmt in {block.format for block in source_blocks}
                    }
                    self.folder.write_source(source.name, merge_in_row_order(self.inputs.format_of[number], lines))
        with world.fail_together("writing the summary"):
            if world.is_main:
                summary = self._summary(blocks)
                self.folder.finish(summary)
        return world.broadcast(summary)

    def _summary(self, blocks: Sequence[RowBlock]) -> dict[str, Any]:
        stats_by_source = {
            source.name: read_stats(self.folder, [block.name for block in blocks if block.source == number])
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


def write_mined(path: Path, lines: Sequence[str], stats: MiningStats) -> list[Path]:
    """Write a rank's part of a block, as `MiningFolder.write_block` expects."""
    rows = path.with_suffix(".jsonl")
    rows.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    stats.write(path)
    return [rows, path.with_suffix(".npz")]


def read_lines(folder: MiningFolder, blocks: Sequence[str]) -> Iterator[str]:
    """The mined rows of blocks, with line ends."""
    for path in folder.block_files(blocks, ".jsonl"):
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from file


def read_stats(folder: MiningFolder, blocks: Sequence[str]) -> MiningStats:
    """The statistics of blocks."""
    return MiningStats.merge([MiningStats.read(path) for path in folder.block_files(blocks, ".npz")])


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


@dataclass(frozen=True, slots=True)
class RowToMine:
    """A row with the number and name of its source, and the negatives that it keeps (document numbers, int64)."""

    row: Example
    source: int
    source_name: str
    existing: IntArray


def mine_row(
    target: RowToMine, query: QueryCandidates, inputs: MiningInputs, options: "MineOptions"
) -> tuple[str, MiningStats]:
    """Choose the negatives of one row among the candidates of its query; returns the line to write, and statistics."""
    pool, row = inputs.pool, target.row
    is_existing = np.isin(pool.stripped_keys[query.candidates], pool.stripped_keys[target.existing])
    chosen = _choose(query, pool.keys[query.candidates], is_existing, len(target.existing), options)
    negatives = np.concatenate([target.existing, query.candidates[chosen]])
    existing_scores = query.existing_scores[np.searchsorted(query.existing, target.existing)]
    scores = np.concatenate([existing_scores, query.scores[chosen]])
    positives = np.searchsorted(query.answers, pool.numbers(text_keys(row.positives.texts)))
    positive_scores = query.answer_scores[positives]
    source_ids = inputs.ids[target.source]
    ids = [] if source_ids is None else [source_ids.get(number) for number in negatives.tolist()]
    line = format_row(
        row,
        [pool[number] for number in negatives.tolist()],
        ids if any(ids) else [],
        (positive_scores.tolist(), scores.tolist()) if options.scores else None,
        partial(written_item, folder=Path(options.output_dir)),
    )

    limit = threshold(query.reference_score, options, logits=query.logits)
    # Without a margin the limit is infinite; a candidate that scores more than the positive is suspicious all the same.
    suspicious_above = min(query.reference_score, limit)
    best_candidate = int(query.scores.argmax()) if len(query.scores) else -1
    best_is_suspicious = best_candidate >= 0 and float(query.scores[best_candidate]) > suspicious_above
    ranks = query.answer_ranks[positives]
    unranked_positives = positives[ranks >= options.rank_max]  # not among the best `rank_max`

    def suspect(answer: int) -> SuspectedLabel:
        return SuspectedLabel(
            source=target.source_name,
            place=row.place,
            query=shown_item(row.query),
            positive=shown_item(pool[int(query.answers[answer])]),
            positive_score=float(query.answer_scores[answer]),
            document=shown_item(pool[int(query.candidates[best_candidate])]),
            score=float(query.scores[best_candidate]),
            written=bool(best_candidate in chosen or is_existing[best_candidate]),
        )

    stats = MiningStats(
        negatives=np.array([len(scores)]),
        positive_scores=positive_scores,
        negative_scores=scores,
        positive_ranks=ranks[ranks < options.rank_max] + 1,
        negative_ranks=chosen + 1,
        num_candidates=len(query.candidates),
        num_above_margin=int((query.scores.astype(np.float64) > limit).sum()),
        num_above_positive=int((query.scores > np.float32(query.reference_score)).sum()),
        # One of each row: twenty from a single bad row would hide the others.
        false_negatives=[suspect(query.reference)] if best_is_suspicious else [],
        wrong_labels=[suspect(int(unranked_positives[query.answer_scores[unranked_positives].argmin()]))]
        if len(unranked_positives) and best_candidate >= 0
        else [],
    )
    return line, stats


def threshold(positive_score: float, options: "MineOptions", *, logits: bool) -> float:
    """The score above which a candidate is too close to the positive; infinity without a margin.

    The relative margin is a fraction of the score's magnitude, so that it lowers a negative score as well, as in
    sentence-transformers; for positive scores it is the positive-aware rule of Moreira et al., "NV-Retriever" (2024),
    arXiv 2407.15831: 0.05 keeps candidates that score at most 95 % of the positive. Scores that are `logits` have no
    zero to take a fraction of: the margin is a fraction of the positive's probability, sigmoid(score).
    """
    limit = np.inf
    if options.absolute_margin is not None:
        limit = min(limit, positive_score - options.absolute_margin)
    if options.relative_margin is not None:
        margin = options.relative_margin
        if logits:
            # The logit of (1 - margin) sigmoid(score); sigmoid itself is 1 for scores above 37.
            below = np.logaddexp(np.log(margin) if margin else -np.inf, -positive_score)
            limit = min(limit, float(np.log1p(-margin) - below))
        else:
            limit = min(limit, positive_score - margin * abs(positive_score))
    return limit


def _choose(
    query: QueryCandidates, keys: IntArray, is_existing: NDArray[np.bool_], num_existing: int, options: "MineOptions"
) -> IntArray:
    """Indices of the candidates that become negatives, int64 [n], best first.

    As in sentence-transformers' `mine_hard_negatives`, `rank_min` skips the best of the candidates that qualify.
    Random sampling depends on the seed, the query and the documents alone. `keys`, [C], are the text keys of the
    candidates; `is_existing`, [C], marks those among the `num_existing` negatives that the row keeps.
    """
    scores = query.scores
    exact = scores.astype(np.float64)
    qualifies = exact <= threshold(query.reference_score, options, logits=query.logits)  # all limits are inclusive
    if options.max_score is not None:
        qualifies &= exact <= options.max_score
    if options.min_score is not None:
        qualifies &= exact >= options.min_score
    indices = np.flatnonzero(qualifies)
    # A teacher's scores are not in the order of the search; ties keep that order.
    indices = indices[np.argsort(-scores[indices], kind="stable")][options.rank_min :]
    indices = indices[~is_existing[indices]]
    count = max(0, options.negatives - num_existing)
    if options.sampling.is_random and len(indices) > count:
        bits = random_bits(make_key(options.seed, Purpose.mined_negatives, query.key), keys[indices])
        indices = indices[np.sort(np.argsort(bits, kind="stable")[:count])]
    return indices[:count].astype(np.int64)
