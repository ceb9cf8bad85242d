"""How a batch's vectors lie: how near positives and the hardest negatives are, and how far vectors spread.

Measured beside a loss, never part of it: nothing here has a gradient, and nothing is read from the device, so every
shape follows from numbers that the host knows.

R: rows of a rank, filled up to that of the rank that has most; H: documents of a row, filled up likewise; N: R times
the number of ranks; D: dimensions; c: rows of a tile.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from embedtrain.distributed.collectives import gather_rows, sum_over_ranks
from embedtrain.losses.similarity import widened
from embedtrain.losses.types import BatchInfo

# Of larger batches the first rows are measured, of longer rows the first documents: every rank holds so many vectors.
MEASURED_ROWS = 2048
MEASURED_DOCUMENTS = 8
# A negative nearer than this share of the positive's similarity is suspected to answer the query too: the limit of
# Moreira et al., "NV-Retriever" (2024).
SUSPECTED = 0.95
# Of similarities held at a time: 16 MiB of fp32.
_TILE_CELLS = 1 << 22


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """Which rows of a global batch are measured. `room` and `width` are the same on every rank.

    Attributes:
        rows: of this rank, the first ones.
        room: rows of the rank that has most, at least 1.
        width: documents of the row that has most, at least 1.
    """

    rows: int
    room: int
    width: int

    @classmethod
    def of(cls, num_rows: int, max_documents: int, rank: int, size: int) -> "MeasuredRows":
        """The first rows of a global batch of `num_rows`, dealt to the ranks in turn."""
        measured = min(num_rows, MEASURED_ROWS)
        width = max(1, min(max_documents, MEASURED_DOCUMENTS))
        return cls(len(range(rank, measured, size)), max(1, -(-measured // size)), width)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What a source's rows mean to its loss.

    Attributes:
        positives: whether a row's first document answers its query.
        in_batch: whether other rows' documents are negatives of it.
    """

    positives: bool = True
    in_batch: bool = True


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one rank, or of all.

    Attributes:
        queries: [R, D], of length 1.
        documents: [R, H, D], of length 1.
        there: bool [R, H], where a row has a document.
        asked: bool [R], where there is a row.
        query_keys: int64 [R].
        document_keys: int64 [R, 2 H], by text and by id.
    """

    queries: Tensor
    documents: Tensor
    there: Tensor
    asked: Tensor
    query_keys: Tensor
    document_keys: Tensor

    def of_all_ranks(self) -> "_Rows":
        """Gathered, [N, ...]."""
        counts = [len(self.queries)] * dist.get_world_size()
        flags = torch.cat([self.there, self.asked.unsqueeze(1)], dim=1).long()
        batch_info = gather_rows(torch.cat([self.document_keys, self.query_keys.unsqueeze(1), flags], dim=1), counts)
        width = self.there.shape[1]
        keys, query_keys, there, asked = batch_info.split([2 * width, 1, width, 1], dim=1)
        return _Rows(
            gather_rows(self.queries, counts),
            gather_rows(self.documents, counts),
            there.bool(),
            asked.squeeze(1).bool(),
            query_keys.squeeze(1).contiguous(),  # torch.searchsorted would warn of it
            keys,
        )


@torch.no_grad()
def geometry(
    queries: Tensor, documents: Tensor, batch_info: BatchInfo, sample: MeasuredRows, row_spec: RowSpec
) -> dict[str, Tensor]:
    """Figures of the global batch. A collective: every rank calls it, one without rows too.

    Over the cosines of the measured rows of all ranks, negatives of a row being all their documents but those that
    answer its query, or one that reads the same, by text or by id:

    - `positive_similarity`: the mean of queries with their positives.
    - `hardest_negative_similarity`: the mean of queries with the nearest of their negatives.
    - `false_negatives`: the share of all pairs of a query and a negative whose cosine is above 0.95 of the
      positive's (p - 0.05 |p|, so that it means the same where p is negative); they may be answers nobody marked.
    - `alignment`: the mean squared distance of queries and positives of length 1, and
    - `uniformity`: the logarithm of the mean of exp(-2 d^2) over the distances d of all pairs of queries, and of all
      pairs of positives, the mean of both (Wang and Isola, "Understanding Contrastive Representation Learning
      through Alignment and Uniformity on the Hypersphere", 2020).

    Args:
        queries: [B, D].
        documents: [M, D].
        batch_info: see there.
        sample: see there.
        row_spec: where rows have no positives, there is `uniformity` alone.

    Returns:
        This rank's parts of them: the ranks' add up. NaN where there is nothing to measure.
    """
    with torch.autocast(queries.device.type, enabled=False):
        mine = _laid_out(widened(queries), widened(documents), batch_info, sample)
        everyone = mine.of_all_ranks()
        size = dist.get_world_size()
        first = dist.get_rank() * sample.room
        spreads = [_spread(mine.queries, everyone.queries, mine.asked, everyone.asked, first)]
        answered = everyone.there[:, 0]
        spreads.append(_spread(mine.documents[:, 0], everyone.documents[:, 0], mine.there[:, 0], answered, first))
        sums = [*spreads[0], *spreads[1]]
        if row_spec.positives:
            sums += _near(mine, everyone, first, row_spec.in_batch)
        of_queries, pairs, of_positives, positive_pairs, *near = sum_over_ranks(torch.stack(sums)).unbind()
        uniformity = torch.log(of_queries / pairs)
        uniformity = torch.where(
            positive_pairs > 0, (uniformity + torch.log(of_positives / positive_pairs)) / 2, uniformity
        )
        found = {"uniformity": uniformity}
        if near:
            rows, positive, judged, hardest, suspected, negatives = near
            found = {
                "positive_similarity": positive / rows,
                "hardest_negative_similarity": hardest / judged,
                "false_negatives": suspected / negatives,
                "alignment": 2.0 - 2.0 * positive / rows,
                **found,
            }
        return {name: value / size for name, value in found.items()}


def _laid_out(queries: Tensor, documents: Tensor, batch_info: BatchInfo, sample: MeasuredRows) -> _Rows:
    """This rank's rows in their places, with as many places as every rank has."""
    place = torch.arange(sample.room, device=queries.device)
    asked = place < sample.rows
    begin, end = torch.searchsorted(batch_info.owners, place), torch.searchsorted(batch_info.owners, place, right=True)
    at = begin.unsqueeze(1) + torch.arange(sample.width, device=queries.device)
    there = (at < end.unsqueeze(1)) & asked.unsqueeze(1)
    ids = batch_info.document_keys if batch_info.document_ids is None else batch_info.document_ids
    keys = [_taken(of, at) for of in (batch_info.document_keys, ids)]
    return _Rows(
        F.normalize(_taken(queries, place), dim=-1),
        F.normalize(_taken(documents, at), dim=-1),
        there,
        asked,
        _taken(batch_info.query_keys, place),
        torch.cat(keys, dim=1),
    )


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """Values at places; whatever where there is none."""
    if not len(values):
        return values.new_zeros((*places.shape, *values.shape[1:]))
    return values[places.clamp(max=len(values) - 1)]


def _spread(mine: Tensor, everyone: Tensor, valid: Tensor, others: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Sum of exp(-2 d^2) over pairs of one of this rank's vectors and another one, and their number."""
    total, pairs = torch.zeros(2, dtype=torch.float64, device=mine.device).unbind()
    for start, end in _tiles(len(mine), len(everyone)):
        counted = valid[start:end].unsqueeze(1) & others
        counted.diagonal(first + start).fill_(False)  # with itself
        close = (4.0 * (mine[start:end] @ everyone.T) - 4.0).exp_().masked_fill_(~counted, 0.0)
        total = total + close.sum(dtype=torch.float64)
        pairs = pairs + counted.sum()
    return total, pairs


def _near(mine: _Rows, everyone: _Rows, first: int, in_batch: bool) -> list[Tensor]:
    """Sums: rows with a positive, its cosine, those with a negative too, the hardest's cosine, suspects, negatives."""
    width = everyone.there.shape[1]
    documents, there = everyone.documents.flatten(0, 1), everyone.there.flatten()
    codes = [_codes(keys.flatten()) for keys in everyone.document_keys.split(width, dim=1)]
    row_of = torch.arange(len(documents), device=documents.device) // width
    positive = (mine.queries * mine.documents[:, 0]).sum(dim=1)
    limit = positive - (1.0 - SUSPECTED) * positive.abs()
    has = mine.there[:, 0]
    judged, hardest, suspected, negatives = torch.zeros(4, dtype=torch.float64, device=has.device).unbind()
    for start, end in _tiles(len(positive), len(documents)):
        counted = has[start:end].unsqueeze(1) & there
        for of in codes:
            counted &= ~_answers(mine.query_keys[start:end], everyone, of, width)
        if not in_batch:
            here = torch.arange(first + start, first + end, device=row_of.device)
            counted &= row_of == here.unsqueeze(1)
        scores = (mine.queries[start:end] @ documents.T).masked_fill_(~counted, -torch.inf)
        top = scores.amax(dim=1)
        any_negative = top > -torch.inf
        judged = judged + any_negative.sum()
        hardest = hardest + top.masked_fill(~any_negative, 0.0).sum(dtype=torch.float64)
        suspected = suspected + (scores > limit[start:end].unsqueeze(1)).sum()
        negatives = negatives + counted.sum()
    of_rows = positive.masked_fill(~has, 0.0).sum(dtype=torch.float64)
    return [has.sum().double(), of_rows, judged, hardest, suspected, negatives]


def _codes(keys: Tensor) -> Tensor:
    """Numbers from 0 that are equal where keys are. Not `unique`, whose size the host would have to wait for."""
    ordered, order = keys.sort()
    fresh = torch.zeros_like(ordered)
    fresh[1:] = (ordered[1:] != ordered[:-1]).long()
    return torch.empty_like(keys).scatter_(0, order, fresh.cumsum(0))


def _answers(keys: Tensor, everyone: _Rows, codes: Tensor, width: int) -> Tensor:
    """Bool [c, N H]: documents that have the code of a positive of the row's query, or of an equal one."""
    ordered = keys.sort()[0]
    at = torch.searchsorted(ordered, everyone.query_keys).clamp(max=len(keys) - 1)
    asks = (ordered[at] == everyone.query_keys) & everyone.there[:, 0]
    table = torch.zeros(len(keys) + 1, len(codes), dtype=torch.bool, device=keys.device)  # the last row is nobody's
    table[torch.where(asks, at, len(keys)), codes[::width]] = torch.ones((), dtype=torch.bool, device=keys.device)
    return table.index_select(0, torch.searchsorted(ordered, keys)).index_select(1, codes)


def _tiles(rows: int, width: int) -> list[tuple[int, int]]:
    """Stretches of rows whose similarities fit."""
    height = max(1, _TILE_CELLS // max(1, width))
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]
