"""Metrics of a batch's embeddings: similarity of positives and of the hardest negatives, alignment, uniformity.

Measured beside a loss, never part of it: nothing here has a gradient, and nothing is read back from the device, so
every shape follows from numbers that the host knows.

R: rows of a rank, padded to the largest number of any rank; H: documents of a row, padded likewise; N: R times the
number of ranks; D: dimensions; c: rows of a tile.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from embedtrain.distributed.collectives import gather_rows, sum_over_ranks
from embedtrain.losses.excluded import dense_codes
from embedtrain.losses.similarity import at_least_float32, row_slices
from embedtrain.losses.types import BatchInfo

# Only the first rows of larger batches are measured, and the first documents of longer rows: every rank holds them all.
MAX_ROWS = 2048
MAX_DOCUMENTS = 8
# A negative more similar than this fraction of the positive's similarity may be a false negative: the limit of Moreira
# et al., "NV-Retriever" (2024).
FALSE_NEGATIVE_RATIO = 0.95
# Similarities held at a time: 16 MiB of fp32.
TILE_CELLS = 1 << 22


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """Which rows of a global batch are measured; the maxima are at least 1 and the same on every rank."""

    num_rows: int  # the first so many rows of this rank
    max_rows: int  # rows of the rank with the most
    max_documents: int  # documents of the row with the most

    @classmethod
    def of(cls, num_rows: int, max_documents: int, rank: int, size: int) -> "MeasuredRows":
        """The first rows of a global batch of `num_rows`, dealt to the ranks in turn."""
        measured = min(num_rows, MAX_ROWS)
        documents = max(1, min(max_documents, MAX_DOCUMENTS))
        return cls(len(range(rank, measured, size)), max(1, -(-measured // size)), documents)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What the documents of a row are to the loss of its source."""

    has_positive: bool = True  # the first document answers the query
    in_batch_negatives: bool = True  # documents of other rows are negatives


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Rows of one rank, or of all; vectors have length 1."""

    queries: Tensor  # [R, D]
    documents: Tensor  # [R, H, D]
    has_document: Tensor  # bool [R, H]
    is_row: Tensor  # bool [R], false for padding
    query_keys: Tensor  # int64 [R]
    document_keys: Tensor  # int64 [R, 2 H], by text and by id

    def gather(self) -> "_PaddedRows":
        """The rows of all ranks, [N, ...]."""
        counts = [len(self.queries)] * dist.get_world_size()
        flags = torch.cat([self.has_document, self.is_row.unsqueeze(1)], dim=1).long()
        columns = torch.cat([self.document_keys, self.query_keys.unsqueeze(1), flags], dim=1)
        width = self.has_document.shape[1]
        keys, query_keys, has_document, is_row = gather_rows(columns, counts).split([2 * width, 1, width, 1], dim=1)
        return _PaddedRows(
            gather_rows(self.queries, counts),
            gather_rows(self.documents, counts),
            has_document.bool(),
            is_row.squeeze(1).bool(),
            query_keys.squeeze(1).contiguous(),  # torch.searchsorted warns otherwise
            keys,
        )


@torch.no_grad()
def batch_statistics(
    queries: Tensor, documents: Tensor, batch_info: BatchInfo, measured: MeasuredRows, row_spec: RowSpec
) -> dict[str, Tensor]:
    """Metrics of the global batch. A collective: every rank calls it, with or without rows.

    Computed from the cosines of the measured rows of all ranks. Negatives of a row are all their documents except those
    that answer its query or an equal one, by text or by id:

    - `positive_similarity`: the mean over queries of the similarity of the positive.
    - `hardest_negative_similarity`: the mean over queries of the similarity of the nearest negative.
    - `false_negatives`: the fraction of all pairs of a query and a negative whose cosine is above 0.95 of the
      positive's (p - 0.05 |p|, which means the same for a negative p); they may be unlabelled answers.
    - `alignment`: the mean squared distance of queries and positives of length 1.
    - `uniformity`: the logarithm of the mean of exp(-2 d^2) over the distances d of all pairs of queries, and of all
      pairs of positives, the mean of both (Wang and Isola, "Understanding Contrastive Representation Learning
      through Alignment and Uniformity on the Hypersphere", 2020).

    Rows without positives have only `uniformity`. Queries [B, D] and documents [M, D] to this rank's parts, which add
    up over the ranks; NaN where there is nothing to measure.
    """
    with torch.autocast(queries.device.type, enabled=False):
        local = _padded(at_least_float32(queries), at_least_float32(documents), batch_info, measured)
        rows = local.gather()
        size = dist.get_world_size()
        first = dist.get_rank() * measured.max_rows
        sums = [
            *_uniformity_sums(local.queries, rows.queries, local.is_row, rows.is_row, first),
            *_uniformity_sums(
                local.documents[:, 0], rows.documents[:, 0], local.has_document[:, 0], rows.has_document[:, 0], first
            ),
        ]
        if row_spec.has_positive:
            sums += _similarity_sums(local, rows, first, row_spec.in_batch_negatives)
        query_sum, query_pairs, positive_sum, positive_pairs, *similarity_sums = sum_over_ranks(
            torch.stack(sums)
        ).unbind()
        uniformity = torch.log(query_sum / query_pairs)
        uniformity = torch.where(
            positive_pairs > 0, (uniformity + torch.log(positive_sum / positive_pairs)) / 2, uniformity
        )
        metrics = {"uniformity": uniformity}
        if similarity_sums:
            num_rows, positive, num_with_negative, hardest, num_suspects, num_negatives = similarity_sums
            metrics = {
                "positive_similarity": positive / num_rows,
                "hardest_negative_similarity": hardest / num_with_negative,
                "false_negatives": num_suspects / num_negatives,
                "alignment": 2.0 - 2.0 * positive / num_rows,
                **metrics,
            }
        return {name: value / size for name, value in metrics.items()}


def _padded(queries: Tensor, documents: Tensor, batch_info: BatchInfo, measured: MeasuredRows) -> _PaddedRows:
    """This rank's rows, padded to the same shape on every rank."""
    index = torch.arange(measured.max_rows, device=queries.device)
    is_row = index < measured.num_rows
    owners = batch_info.owners
    begin, end = torch.searchsorted(owners, index), torch.searchsorted(owners, index, right=True)
    document = begin.unsqueeze(1) + torch.arange(measured.max_documents, device=queries.device)
    has_document = (document < end.unsqueeze(1)) & is_row.unsqueeze(1)
    ids = batch_info.document_keys if batch_info.document_ids is None else batch_info.document_ids
    keys = [_take(values, document) for values in (batch_info.document_keys, ids)]
    return _PaddedRows(
        F.normalize(_take(queries, index), dim=-1),
        F.normalize(_take(documents, document), dim=-1),
        has_document,
        is_row,
        _take(batch_info.query_keys, index),
        torch.cat(keys, dim=1),
    )


def _take(values: Tensor, indices: Tensor) -> Tensor:
    """Values at indices; arbitrary ones beyond the end."""
    if not len(values):
        return values.new_zeros((*indices.shape, *values.shape[1:]))
    return values[indices.clamp(max=len(values) - 1)]


def _uniformity_sums(
    local: Tensor, vectors: Tensor, local_valid: Tensor, valid: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Sum of exp(-2 d^2) over the pairs of a local vector and any other vector, and the number of pairs."""
    total, pairs = torch.zeros(2, dtype=torch.float64, device=local.device).unbind()
    for start, end in _tiles(len(local), len(vectors)):
        counted = local_valid[start:end].unsqueeze(1) & valid
        counted.diagonal(first + start).fill_(False)  # a vector with itself
        kernel = (4.0 * (local[start:end] @ vectors.T) - 4.0).exp_().masked_fill_(~counted, 0.0)
        total = total + kernel.sum(dtype=torch.float64)
        pairs = pairs + counted.sum()
    return total, pairs


def _similarity_sums(local: _PaddedRows, rows: _PaddedRows, first: int, in_batch_negatives: bool) -> list[Tensor]:
    """Of this rank's rows, in the order of the returned list."""
    width = rows.has_document.shape[1]
    documents, has_document = rows.documents.flatten(0, 1), rows.has_document.flatten()
    all_codes = [dense_codes(keys.flatten()) for keys in rows.document_keys.split(width, dim=1)]
    row_of = torch.arange(len(documents), device=documents.device) // width
    positive = (local.queries * local.documents[:, 0]).sum(dim=1)
    limit = positive - (1.0 - FALSE_NEGATIVE_RATIO) * positive.abs()
    has_positive = local.has_document[:, 0]
    num_with_negative, hardest, num_suspects, num_negatives = torch.zeros(
        4, dtype=torch.float64, device=has_positive.device
    ).unbind()
    for start, end in _tiles(len(positive), len(documents)):
        is_negative = has_positive[start:end].unsqueeze(1) & has_document
        for document_codes in all_codes:
            is_negative &= ~_answers(local.query_keys[start:end], rows, document_codes, width)
        if not in_batch_negatives:
            own = torch.arange(first + start, first + end, device=row_of.device)
            is_negative &= row_of == own.unsqueeze(1)
        scores = (local.queries[start:end] @ documents.T).masked_fill_(~is_negative, -torch.inf)
        highest = scores.amax(dim=1)
        has_negative = highest > -torch.inf
        num_with_negative = num_with_negative + has_negative.sum()
        hardest = hardest + highest.masked_fill(~has_negative, 0.0).sum(dtype=torch.float64)
        num_suspects = num_suspects + (scores > limit[start:end].unsqueeze(1)).sum()
        num_negatives = num_negatives + is_negative.sum()
    positive_sum = positive.masked_fill(~has_positive, 0.0).sum(dtype=torch.float64)
    return [has_positive.sum().double(), positive_sum, num_with_negative, hardest, num_suspects, num_negatives]


def _answers(keys: Tensor, rows: _PaddedRows, document_codes: Tensor, width: int) -> Tensor:
    """Bool [c, N H]: documents that have the code of a positive of the row's query, or of an equal one."""
    ordered = keys.sort()[0]
    index = torch.searchsorted(ordered, rows.query_keys).clamp(max=len(keys) - 1)
    is_equal = (ordered[index] == rows.query_keys) & rows.has_document[:, 0]
    # The last row is unused.
    table = torch.zeros(len(keys) + 1, len(document_codes), dtype=torch.bool, device=keys.device)
    table[torch.where(is_equal, index, len(keys)), document_codes[::width]] = torch.ones(
        (), dtype=torch.bool, device=keys.device
    )
    return table.index_select(0, torch.searchsorted(ordered, keys)).index_select(1, document_codes)


def _tiles(rows: int, width: int) -> list[tuple[int, int]]:
    """Ranges of rows whose similarities fit into one tile."""
    height = max(1, TILE_CELLS // max(1, width))
    return row_slices(rows, height)
