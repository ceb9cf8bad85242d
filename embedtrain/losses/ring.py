"""The candidates of all ranks: gathered, or travelling around a ring of ranks for statistics of each row over them.

A ring is for batches whose candidates no rank could hold. A loss names its statistics, such as the logsumexp of a row's
scores, in a `Reducer`, and is an ordinary function of them. In the forward pass candidates travel, once or more; in the
backward pass they travel again for the gradient of this rank's rows, then the rows with what was computed of them, for
the gradient of this rank's candidates. Scores are computed again each time; gradients never travel.

`softmax` and `distill_similarities` have loops of their own, which accumulate the gradient while they still compute the
statistics: candidates travel one time less, and fewer products of queries with candidates are computed. As a `Reducer`,
InfoNCE would compute 5 of them instead of 4 around a ring, and of 3 without one: 1.23 and 1.63 times the CPU time, of
2,048 rows of 384 dimensions. `DistillSimilarities` would compute 10 instead of 9, and of 4.

B: rows of this rank; c, t: rows and candidates of one tile; S: statistics.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.losses import Implementation
from embedtrain.distributed.collectives import gather_rows, ring
from embedtrain.losses.encoded import Part
from embedtrain.losses.score import Columns, ScoreTile
from embedtrain.losses.types import GlobalRows, rows_per_rank

# Beyond so many bytes of other ranks' candidates and their gradient, they are not all held at a time.
MAX_GATHERED_BYTES = 1 << 31

# Of each part of the texts of all ranks, the rows of each text.
PartSizes = Sequence[NDArray[np.int64] | None]


@dataclass(frozen=True, slots=True)
class Texts:
    """Consecutive texts of the batch: what the encoder computed of them, and perhaps further numbers of each."""

    first: int  # index of the first one among those of all ranks
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return len(self.parts[0])

    def slice(self, start: int, end: int) -> "Texts":
        """The texts from `start` to `end`; their values are views."""
        return Texts(self.first + start, tuple(part.slice(start, end) for part in self.parts))


@dataclass(frozen=True, slots=True)
class Block:
    """The candidates of one rank, in the form in which rows are compared with them."""

    first: int  # index of the first one among those of all ranks
    columns: tuple[Columns, ...]

    def __len__(self) -> int:
        return len(self.columns[0])


class Reducer(ABC):
    """What a loss has to know of each row's scores with all candidates.

    Attributes:
        num_passes: how often the candidates pass before the statistics are known.
    """

    num_passes: int = 1

    @abstractmethod
    def columns(self, parts: Sequence[Part]) -> tuple[Columns, ...]:
        """Texts as candidates; differentiable."""

    @abstractmethod
    def slices(self, rows: Texts, num_candidates: int) -> list[tuple[int, int]]:
        """Consecutive rows whose scores are in memory at a time."""

    @abstractmethod
    def start(self, rows: Texts) -> tuple[Part, ...]:
        """What is known of each row before the first candidate."""

    @abstractmethod
    def collect(self, number: int, rows: Texts, known: Sequence[Part], block: Block) -> None:
        """Add further candidates to what is `known` of these rows, in place, in the pass of this number."""

    @abstractmethod
    def finish(self, known: Sequence[Part]) -> tuple[Tensor, tuple[Part, ...]]:
        """The statistics [B, S] after the last pass, and what of each row `derivatives` need."""

    @abstractmethod
    def derivatives(
        self, rows: Texts, kept: Sequence[Part], upstream: Tensor, block: Block
    ) -> list[tuple[ScoreTile, Tensor, Tensor]]:
        """For each part, a tile, and the gradient of its scores: [c, t] and a factor of each row [c, 1].

        `upstream` [c, S] is that of the statistics.
        """

    @staticmethod
    def own_column(columns: Tensor, rows: Texts, block: Block) -> tuple[Tensor, Tensor]:
        """Where a block has the candidate of each row that `columns` [N] name: int64 [c, 1], and whether it has it."""
        index = (columns[rows.first : rows.first + len(rows)] - block.first).unsqueeze(1)
        return index.clamp(0, len(block) - 1), (index >= 0) & (index < len(block))


def ring_statistics(
    reducer: Reducer, rows: Texts, candidates: Texts, global_rows: GlobalRows, sizes: tuple[PartSizes, PartSizes]
) -> Tensor:
    """The statistics of this rank's rows over the candidates of all ranks: [B, S], differentiable. A collective.

    The backward pass is a collective as well. `sizes` are those of the parts of rows and of candidates.
    """
    local = Block(candidates.first, reducer.columns(candidates.parts))
    values = [part.values for part in (*rows.parts, *local.columns)]
    problem = _Problem(reducer, rows, candidates, local, global_rows, sizes)
    statistics: Tensor = _RingStatistics.apply(*values, problem)  # type: ignore[no-untyped-call]
    return statistics


def uses_ring(implementation: Implementation, rows: GlobalRows, width: int, dtype: torch.dtype) -> bool:
    """Whether documents with rows of this `width` travel; the same on every rank."""
    if implementation is not Implementation.auto:
        return implementation is Implementation.ring
    counts = rows.counts.documents
    num_rows = sum(rows_per_rank(rows.part_sizes.documents, counts))
    return gathered_bytes(num_rows, width, dtype, len(counts)) > MAX_GATHERED_BYTES


def gather_part(part: Part, sizes: NDArray[np.int64] | None, counts: Sequence[int]) -> Part:
    """The texts of all ranks, of which each rank has `counts`; differentiable. A collective.

    `sizes` are the rows of each text of all ranks.
    """
    lengths = rows_per_rank(sizes, counts)
    ids = None if part.ids is None else gather_rows(part.ids, lengths)
    return Part(gather_rows(part.values, lengths), sizes, ids)


def gathered_bytes(num_rows: int, width: int, dtype: torch.dtype, num_ranks: int) -> float:
    """Bytes of other ranks' candidates, of `num_rows` over all ranks, and of their gradient."""
    return 2 * num_rows * (1.0 - 1.0 / num_ranks) * width * dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Problem:
    reducer: Reducer
    rows: Texts
    candidates: Texts
    local: Block
    global_rows: GlobalRows
    sizes: tuple[PartSizes, PartSizes]

    def blocks(self) -> Iterator[Block]:
        """Every rank's candidates, beginning with this rank's."""
        for texts in passing_texts(self.candidates.parts, self.sizes[1], self.global_rows.counts.documents):
            yield Block(texts.first, self.reducer.columns(texts.parts))

    def slices(self, rows: Texts, known: Sequence[Part], block: Block) -> Iterator[tuple[Texts, list[Part], slice]]:
        """Rows whose scores with a block are in memory at a time, with what is known of them."""
        for start, end in self.reducer.slices(rows, len(block)) if len(block) else ():
            yield rows.slice(start, end), [part.slice(start, end) for part in known], slice(start, end)


class _RingStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        problem: _Problem = inputs[-1]
        known = problem.reducer.start(problem.rows)
        for number in range(problem.reducer.num_passes):
            for block in problem.blocks():
                for rows, of_rows, _ in problem.slices(problem.rows, known, block):
                    problem.reducer.collect(number, rows, of_rows, block)
        statistics, ctx.kept = problem.reducer.finish(known)
        ctx.problem = problem
        return statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        problem, kept, upstream = ctx.problem, ctx.kept, grads[0].contiguous()
        reducer, local = problem.reducer, problem.local
        row_grads = [part.with_values(torch.zeros_like(part.values)) for part in problem.rows.parts]
        for block in problem.blocks():
            for rows, of_rows, where in problem.slices(problem.rows, kept, block):
                derivatives = reducer.derivatives(rows, of_rows, upstream[where], block)
                for grad, (tile, tile_grads, weights) in zip(row_grads, derivatives, strict=True):
                    tile.add_anchor_grads(grad.slice(where.start, where.stop).values, tile_grads, weights)
        column_grads = [torch.zeros_like(columns.values) for columns in local.columns]
        num_parts = len(problem.rows.parts)
        of_parts = list(problem.sizes[0])
        # What is kept is of each text, or of each row of the first part.
        row_sizes = [*of_parts, *(None if part.sizes is None else of_parts[0] for part in kept), None]
        travelling = (*problem.rows.parts, *kept, Part(upstream))
        for passing in passing_texts(travelling, row_sizes, problem.global_rows.counts.queries):
            rows = Texts(passing.first, passing.parts[:num_parts])
            for of_slice, of_rows, where in problem.slices(rows, passing.parts[num_parts:-1], local):
                derivatives = reducer.derivatives(of_slice, of_rows, passing.parts[-1].values[where], local)
                for grad, (tile, tile_grads, weights) in zip(column_grads, derivatives, strict=True):
                    tile.add_candidate_grads(grad, tile_grads, weights)
        return *(grad.values for grad in row_grads), *column_grads, None


def passing_texts(parts: Sequence[Part], sizes: PartSizes, counts: Sequence[int]) -> Iterator[Texts]:
    """Every rank's texts, of which each rank has `counts`, beginning with this rank's. A collective.

    `sizes` are those of each part of the texts of all ranks.
    """
    for rank, passing in passing_parts(parts, sizes, [counts] * len(parts)):
        yield Texts(sum(counts[:rank]), tuple(passing))


def passing_parts(
    parts: Sequence[Part], sizes: PartSizes, counts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, list[Part]]]:
    """As `passing_texts`, with the texts of each rank in each part; yields the rank and its parts."""
    lengths = [rows_per_rank(of_part, numbers) for of_part, numbers in zip(sizes, counts, strict=True)]
    with_ids = [index for index, part in enumerate(parts) if part.ids is not None]
    tensors = [*(part.values for part in parts), *(ids for part in parts if (ids := part.ids) is not None)]
    for rank, received in ring(tensors, [*lengths, *(lengths[index] for index in with_ids)]):
        ids_of = dict(zip(with_ids, received[len(parts) :], strict=True))
        passing = []
        for index, (of_part, numbers) in enumerate(zip(sizes, counts, strict=True)):
            first = sum(numbers[:rank])
            of_rank = None if of_part is None else of_part[first : first + numbers[rank]]
            passing.append(Part(received[index], of_rank, ids_of.get(index)))
        yield rank, passing
