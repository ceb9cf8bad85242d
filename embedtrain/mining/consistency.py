"""The consistency filter: ranks the positives of each row by a model, and keeps those that rank high.

Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training" (2022), section 3.1. The rank of a positive
is 1 plus the number of documents whose exact score is above its own, without documents that answer the query as well:
the positives of all rows with the same query, and documents that equal one of them or the query itself.

Shapes: N documents of the pool, P positives of a source (row by row), p those of a block.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from embedtrain.data.cache.row_store import ArrowRows
from embedtrain.data.rows import Example, format_row, text_keys
from embedtrain.data.sampling.permutation import Purpose, make_key, permute
from embedtrain.data.sources.pictures import shown_item, written_item
from embedtrain.distributed.world import explain_lost_contact
from embedtrain.errors import DataError
from embedtrain.inference.encode import ProgressCallback
from embedtrain.inference.index import ShardedIndex
from embedtrain.mining.folder import quantiles
from embedtrain.mining.inputs import FloatArray, QueryDocumentPairs, RowBlock, UniqueQueries, row_blocks, scores_of
from embedtrain.mining.options import FilterOptions
from embedtrain.mining.pool import DocumentPool, IntArray, MiningSource
from embedtrain.mining.run import Finish, RowSearch, run_row_search
from embedtrain.tracking.console import Console
from embedtrain.tracking.pages import Page

_RANKS = (1, 2, 5, 10, 20, 50, 100, 1000)
_TEXT_WIDTH = 100  # columns of a printed text; summary.json has the whole texts


@dataclass(frozen=True, kw_only=True)
class SourceSummary:
    """The results of one source with P positives."""

    MAX_EXAMPLES: ClassVar[int] = 20

    rows: int
    kept_rows: int
    shortened_rows: int  # kept rows with fewer positives than before
    kept_positives: int
    beyond_rank: int  # positives whose rank is above keep_rank
    below_score: int  # other positives whose score is below min_score
    ranks: NDArray[np.int64]  # [P]
    scores: NDArray[np.float32]  # [P]
    examples: list[dict[str, Any]]  # the first rejected positives

    def to_json(self, name: str, rejected: str | None) -> dict[str, Any]:
        """For summary.json; `rejected` is the directory of rejected rows, None if none are."""
        return {
            "file": f"{name}.jsonl",
            "rejected_file": None if rejected is None else f"{rejected}/{name}.jsonl",
            "rows": self.rows,
            "kept_rows": self.kept_rows,
            "rows_with_fewer_positives": self.shortened_rows,
            "positives": len(self.ranks),
            "kept_positives": self.kept_positives,
            "positives_beyond_keep_rank": self.beyond_rank,
            "positives_below_min_score": self.below_score,
            "positives_by_rank": {str(rank): int((self.ranks <= rank).sum()) for rank in _RANKS},
            "scores": quantiles(self.scores),
            "rejected": self.examples,
        }


def filter_rows(
    options: FilterOptions, print_summary: Callable[[Page, Mapping[str, Any], FilterOptions], None]
) -> list[Path]:
    """Filter the rows of all sources. A collective; `print_summary` prints the summary on rank 0.

    Returns the files of kept rows, one for each source.
    """

    def rank_positives(search: RowSearch, console: Console) -> Finish:
        consistency_filter = ConsistencyFilter(search, options)
        with console.progress() as progress:
            consistency_filter.rank_positives(progress)
        return consistency_filter.finish

    return run_row_search(options, rank_positives, print_summary, rows="filtered", temporary=".filtering")


def print_summary(page: Page, summary: Mapping[str, Any], options: FilterOptions) -> None:
    """Print what `ConsistencyFilter.finish` returned."""
    for name, source in summary["sources"].items():
        positives = source["positives"]
        page.heading(name)
        path = f"{options.output_dir}/{source['file']}"
        if options.annotate:
            page.facts([("rows written", f"{source['rows']:,} in {path}, with the columns rank and score")])
        else:
            page.facts(_kept_facts(source, path, options))
        counts = source["positives_by_rank"]
        page.table(
            ["rank at most", *counts],
            [["positives", *(f"{count / max(1, positives):.1%}" for count in counts.values())]],
        )
        if source["scores"] is not None:
            page.table(["", *source["scores"]], [["scores", *(f"{value:.4f}" for value in source["scores"].values())]])
        for example in [] if options.annotate else source["rejected"][:3]:
            page.texts(
                [
                    ("query", "", example["query"]),
                    (f"rank {example['rank']:,}", f"{example['score']:.4f}", example["positive"]),
                ],
                plain_width=_TEXT_WIDTH,
            )
    if not options.annotate:
        page.subheading(f"{options.output_dir}/rejected/ has the rejected positives with their ranks and scores")


def _kept_facts(source: Mapping[str, Any], path: str, options: FilterOptions) -> list[tuple[str, str]]:
    positives = source["positives"]
    facts = [("rows kept", f"{_of(source['kept_rows'], source['rows'])} in {path}")]
    if source["rows_with_fewer_positives"]:
        facts.append(("", f"{source['rows_with_fewer_positives']:,} of these have fewer positives than before"))
    facts.append(("positives kept", _of(source["kept_positives"], positives)))
    if options.keep_rank is not None:
        beyond = source["positives_beyond_keep_rank"]
        facts.append(("rejected", f"{_of(beyond, positives)} have a rank above keep_rank={options.keep_rank}"))
    if options.min_score is not None:
        below = source["positives_below_min_score"]
        further = "further " * (options.keep_rank is not None)
        text = f"{further}{_of(below, positives)} score less than min_score={options.min_score:g}"
        facts.append(("rejected", text))
    return facts


def _of(part: int, total: int) -> str:
    return f"{part:,} of {total:,} ({part / max(1, total):.1%})"


REJECTED = "rejected"  # the directory of rows with the positives that were not kept


@dataclass(frozen=True, slots=True)
class _Task:
    """A block of rows whose positives are ranked among one part of the documents."""

    block: RowBlock
    part: int


class ConsistencyFilter:
    """Filters the rows of all sources."""

    def __init__(self, search: RowSearch, options: FilterOptions) -> None:
        self.search, self.options = search, options
        self.part_of = partition(len(search.inputs.pool), options.pool, options.seed)
        self.positives = [_Positives.of(source, search.inputs.pool) for source in search.sources]
        self.tasks = list(self._tasks())

    def _tasks(self) -> Iterator[_Task]:
        """The blocks of each part and document format: an index holds the documents of one of these."""
        numbers: dict[tuple[int, int], int] = {}
        inputs = self.search.inputs
        for part in range(int(self.part_of.max(initial=0)) + 1):
            in_part = []
            for format_of, positives in zip(inputs.format_of, self.positives, strict=True):
                has_positive = np.zeros(len(format_of), dtype=bool)
                has_positive[positives.rows[self.part_of[positives.documents] == part]] = True
                in_part.append(np.where(has_positive, format_of, -1))
            for block in row_blocks(in_part, self.options.query_batch_size):
                if block.format >= 0:
                    key = block.source, block.format
                    number = numbers[key] = numbers.get(key, -1) + 1
                    yield _Task(replace(block, number=number), part)

    def rank_positives(self, progress: ProgressCallback) -> None:
        """Rank and score the positives of every block that is not finished yet. A collective."""
        finished = self.search.folder.finished_blocks()
        remaining = [task for task in self.tasks if task.block.name not in finished]
        total = sum(len(task.block.rows) for task in self.tasks)
        done = total - sum(len(task.block.rows) for task in remaining)
        if self.search.teacher is not None and remaining:
            with explain_lost_contact("encoding documents with the teacher"):
                self.search.teacher.prepare(self.search.inputs.pool, self.search.folder.vectors, progress)
        documents: _PartIndex | None = None
        for task in remaining:
            if documents is None or (documents.part, documents.format) != (task.part, task.block.format):
                documents = None  # frees the vectors before the next ones are encoded
                with explain_lost_contact("encoding documents"):
                    documents = self._index(task, progress)
            with explain_lost_contact(f"ranking the positives of {self.search.sources[task.block.source].name}"):
                self._rank_block(task, documents, progress)
            done += len(task.block.rows)
            progress("ranking positives of rows", done, total)

    def _index(self, task: _Task, progress: ProgressCallback) -> "_PartIndex":
        numbers = np.flatnonzero(self.part_of == task.part)
        index = self.search.index(self.search.inputs.formats[task.block.format], progress, numbers)
        local_of = np.full(len(self.part_of), -1, dtype=np.int64)
        local_of[numbers] = np.arange(len(numbers))
        return _PartIndex(task.part, task.block.format, index, local_of)

    def _rank_block(self, task: _Task, documents: "_PartIndex", progress: ProgressCallback) -> None:
        search, block = self.search, task.block
        source, positives = search.sources[block.source], self.positives[block.source]
        with search.folder.world.fail_together("reading rows to filter"):
            rows = [source.store[row] for row in block.rows.tolist()]
            queries = UniqueQueries.of(rows, source, search.inputs, keep_existing=False)
        # The positives of these rows in this part, by query, as the functions on pairs expect them.
        indices = positives.of_rows(block.rows)
        indices = indices[self.part_of[positives.documents[indices]] == task.part]
        owners = queries.of_row[np.searchsorted(block.rows, positives.rows[indices])]
        order = np.argsort(owners, kind="stable")
        indices, owners = indices[order], owners[order]
        numbers = positives.documents[indices]

        encoded = search.encoder.encode(
            queries.inputs, max_length=source.text_format.query_max_length, existing_prompt=queries.prompts
        )
        vectors = search.encoder.score.search_part(encoded)
        pairs = QueryDocumentPairs(owners, documents.local_of[numbers])
        scores = scores_of(documents.index, vectors, pairs)
        excluded = documents.pairs(queries.excluded)
        above = documents.index.count_above(vectors.take(torch.from_numpy(owners), owners), torch.from_numpy(scores))
        ranks = 1 + above.numpy() - count_above(pairs, scores, excluded, scores_of(documents.index, vectors, excluded))
        if search.teacher is not None:
            scores = search.teacher.scores(queries.texts, QueryDocumentPairs(owners, numbers), progress)

        def write(path: Path) -> Sequence[Path]:
            if not search.folder.world.is_main:  # every rank has the results of all rows
                return []
            np.savez(path.with_suffix(".npz"), indices=indices, ranks=ranks, scores=scores)
            return [path.with_suffix(".npz")]

        search.folder.write_block(block.name, write)

    def finish(self) -> dict[str, Any]:
        """Write the kept and the rejected rows of each source, and the summary. A collective.

        Returns the summary on every rank.
        """
        folder, summary = self.search.folder, dict[str, Any]()
        # On one rank only: a network file system may show the files of other ranks with delay.
        with folder.world.fail_together("writing filtered files"):
            if folder.world.is_main:
                summaries = {}
                filtered_sources = [
                    FilteredSource(source, self.positives[number], *self._results(number), self.options)
                    for number, source in enumerate(self.search.sources)
                ]
                for filtered in filtered_sources:  # before anything is written
                    filtered.require_kept_rows()
                for source, filtered in zip(self.search.sources, filtered_sources, strict=True):
                    if self.options.annotate:
                        folder.write_source(source.name, filtered.annotated_rows())
                    else:
                        folder.write_source(source.name, filtered.kept_rows())
                        folder.write_source(f"{REJECTED}/{source.name}", filtered.rejected_rows())
                    rejected = None if self.options.annotate else REJECTED
                    summaries[source.name] = filtered.summary().to_json(source.name, rejected)
                summary = {"documents": len(self.search.inputs.pool), "sources": summaries}
                folder.finish(summary)
        return folder.world.broadcast(summary)

    def _results(self, source: int) -> tuple[IntArray, FloatArray]:
        """Ranks and scores of all positives of a source, [P]."""
        size = len(self.positives[source].rows)
        ranks, scores = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
        blocks = [task.block.name for task in self.tasks if task.block.source == source]
        for path in self.search.folder.block_files(blocks, ".npz"):
            with np.load(path, allow_pickle=False) as file:
                ranks[file["indices"]], scores[file["indices"]] = file["ranks"], file["scores"]
        return ranks, scores


@dataclass(frozen=True)
class _Positives:
    """The positives of a source, row by row."""

    rows: IntArray  # [P], ascending
    documents: IntArray  # [P], numbers in the pool

    @classmethod
    def of(cls, source: MiningSource, pool: DocumentPool) -> "_Positives":
        store = source.store
        assert isinstance(store.rows, ArrowRows)
        documents = [np.empty(0, dtype=np.int64)]
        for batch_index in range(len(store.rows.batch_starts) - 1):
            texts = store.rows.batch(batch_index).column("positives").flatten().to_pylist()
            documents.append(pool.numbers(text_keys(texts)))
        return cls(np.repeat(np.arange(len(store)), store.num_positives), np.concatenate(documents))

    def of_rows(self, rows: IntArray) -> IntArray:
        """The indices of the positives of these rows, which ascend."""
        return np.flatnonzero(np.isin(self.rows, rows))


@dataclass(frozen=True)
class _PartIndex:
    """The documents of one part of the pool in one format."""

    part: int
    format: int
    index: ShardedIndex
    local_of: IntArray  # [N], the number in `index` of each document of the pool; -1 for those of other parts

    def pairs(self, pairs: QueryDocumentPairs) -> QueryDocumentPairs:
        """The pairs whose document is in this part, by its number in `index`."""
        local = self.local_of[pairs.documents]
        return QueryDocumentPairs(pairs.owners[local >= 0], local[local >= 0])


def partition(num_documents: int, size: int | None, seed: int) -> IntArray:
    """The part of each document, int64 [N]: parts of about `size` documents, drawn at random; None for one part."""
    if size is None or num_documents <= size:
        return np.zeros(num_documents, dtype=np.int64)
    positions = permute(np.arange(num_documents), num_documents, make_key(seed, Purpose.filter_parts))
    return positions % -(-num_documents // size)


def count_above(
    positives: QueryDocumentPairs, scores: FloatArray, others: QueryDocumentPairs, other_scores: FloatArray
) -> IntArray:
    """For each positive, the number of the other documents of its query that score higher: int64 [p]."""
    counts = np.zeros(len(scores), dtype=np.int64)
    for query in np.unique(positives.owners).tolist():
        positions = positives.slice_of(query)
        sorted_scores = np.sort(other_scores[others.slice_of(query)])
        counts[positions] = len(sorted_scores) - np.searchsorted(sorted_scores, scores[positions], side="right")
    return counts


@dataclass(frozen=True)
class FilteredSource:
    """The rows of a source with the ranks and scores of their positives."""

    source: MiningSource
    positives: _Positives
    ranks: IntArray  # [P]
    scores: FloatArray  # [P]
    options: FilterOptions

    @property
    def is_near(self) -> NDArray[np.bool_]:
        """Whether each positive has a sufficient rank, [P]."""
        limit = self.options.keep_rank
        return np.ones(len(self.ranks), dtype=bool) if limit is None else self.ranks <= limit

    @property
    def is_kept(self) -> NDArray[np.bool_]:
        """Whether each positive is kept, [P]."""
        limit = self.options.min_score
        return self.is_near if limit is None else self.is_near & (self.scores.astype(np.float64) >= limit)

    def require_kept_rows(self) -> None:
        """Raise DataError if no row is kept: a later training cannot read a file without rows."""
        options = self.options
        if options.annotate or self.is_kept.any():
            return
        limits = []
        if options.keep_rank is not None:
            limits.append(f"keep_rank={options.keep_rank}, and the best rank of a positive is {self.ranks.min():,}")
        if options.min_score is not None:
            limits.append(f"min_score={options.min_score:g}, and the best score is {self.scores.max():.4f}")
        raise DataError(
            f"the filter keeps none of the {len(self.source.store):,} rows of {self.source.name} "
            f"({'; '.join(limits)}): allow more, or leave this source out of data"
        )

    def kept_rows(self) -> Iterator[str]:
        """The rows with the positives that are kept, as lines; a row without any is left out."""
        for row, _, is_kept in self._rows():
            if is_kept.any():
                yield f"{self._format(row.with_positives(is_kept.tolist()))}\n"

    def rejected_rows(self) -> Iterator[str]:
        """The rows with the positives that are not kept, their ranks and scores, as lines."""
        for row, indices, is_kept in self._rows():
            if not is_kept.all():
                fields = json.loads(self._format(row.with_positives((~is_kept).tolist()), REJECTED))
                fields["ranks"] = self.ranks[indices][~is_kept].tolist()
                fields["scores"] = [float(str(score)) for score in self.scores[indices][~is_kept]]
                yield f"{json.dumps(fields, ensure_ascii=False)}\n"

    def annotated_rows(self) -> Iterator[str]:
        """All rows with the ranks and scores of their positives, as lines."""
        for row, indices, _ in self._rows():
            fields = json.loads(self._format(row))
            fields["rank"] = self.ranks[indices].tolist()
            fields["score"] = [float(str(score)) for score in self.scores[indices]]
            yield f"{json.dumps(fields, ensure_ascii=False)}\n"

    def _format(self, row: Example, subfolder: str = "") -> str:
        """The line of a row in a folder below the output."""
        negatives = row.negatives
        scores = (row.positives.scores, negatives.scores) if row.positives.scores else None
        written = partial(written_item, folder=Path(self.options.output_dir, subfolder))
        return format_row(row, negatives.texts, negatives.ids, scores, written)

    def _rows(self) -> Iterator[tuple[Example, slice, NDArray[np.bool_]]]:
        """Each row, the indices of its positives, and which of them are kept."""
        is_kept = self.is_kept
        ends = np.searchsorted(self.positives.rows, np.arange(len(self.source.store) + 1))
        for row in range(len(self.source.store)):
            indices = slice(int(ends[row]), int(ends[row + 1]))
            yield self.source.store[row], indices, is_kept[indices]

    def summary(self) -> SourceSummary:
        """What was kept."""
        is_kept, num_rows = self.is_kept, len(self.source.store)
        kept_of_row = np.bincount(self.positives.rows[is_kept], minlength=num_rows)
        of_row = np.bincount(self.positives.rows, minlength=num_rows)
        examples = []
        for index in np.flatnonzero(~is_kept)[: SourceSummary.MAX_EXAMPLES].tolist():
            row = self.source.store[int(self.positives.rows[index])]
            first = int(np.searchsorted(self.positives.rows, self.positives.rows[index]))
            examples.append(
                {
                    "row": row.place,
                    "query": shown_item(row.query),
                    "positive": shown_item(row.positives.texts[index - first]),
                    "rank": int(self.ranks[index]),
                    "score": float(self.scores[index]),
                }
            )
        return SourceSummary(
            rows=num_rows,
            kept_rows=int((kept_of_row > 0).sum()),
            shortened_rows=int(((kept_of_row > 0) & (kept_of_row < of_row)).sum()),
            kept_positives=int(is_kept.sum()),
            beyond_rank=int((~self.is_near).sum()),
            below_score=int((self.is_near & ~is_kept).sum()),
            ranks=self.ranks,
            scores=self.scores,
            examples=examples,
        )
