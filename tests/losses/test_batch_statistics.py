"""Statistics of a batch's embeddings equal a plain computation over the global batch on any number of ranks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.losses import batch_statistics as module
from embedtrain.losses.batch_statistics import MeasuredRows, RowSpec, batch_statistics
from embedtrain.losses.build import row_spec_of
from tests.losses.global_batch import GlobalVectors, vectors
from tests.losses.test_infonce import duplicates

ALL = RowSpec()


def textbook(batch: GlobalVectors, row_spec: RowSpec = ALL, *, rows: int | None = None) -> dict[str, float]:
    """From the definitions, pair by pair."""
    queries, documents = F.normalize(batch.queries, dim=1), F.normalize(batch.documents, dim=1)
    measured = range(len(batch.sizes) if rows is None else rows)
    documents_of = {row: batch.documents_of(row)[: module.MAX_DOCUMENTS] for row in measured}
    positives = {row: documents_of[row][0] for row in measured if documents_of[row]}
    ids = batch.document_keys if batch.document_ids is None else batch.document_ids
    hardest, positive, suspected, negatives = [], [], 0, 0
    for row, own in positives.items():
        own_similarity = float(queries[row] @ documents[own])
        positive.append(own_similarity)
        answers = [positives[r] for r in positives if batch.query_keys[r] == batch.query_keys[row]]
        similarities = []
        for other in measured:
            for index in documents_of[other]:
                same = any(keys[index] == keys[a] for a in answers for keys in (batch.document_keys, ids))
                if not same and (row_spec.in_batch_negatives or other == row):
                    similarities.append(float(queries[row] @ documents[index]))
        hardest += [max(similarities)] if similarities else []
        suspected += sum(score > own_similarity - 0.05 * abs(own_similarity) for score in similarities)
        negatives += len(similarities)
    sides = queries[list(measured)], documents[list(positives.values())]
    spread = [torch.pdist(x).pow(2).mul(-2).exp().mean().log().item() for x in sides if len(x) > 1]
    statistics = {"uniformity": sum(spread) / len(spread) if spread else math.nan}
    if not row_spec.has_positive:
        return statistics
    return statistics | {
        "positive_similarity": sum(positive) / len(positive),
        "hardest_negative_similarity": sum(hardest) / len(hardest) if hardest else math.nan,
        "false_negatives": suspected / negatives if negatives else math.nan,
        "alignment": sum((queries[r] - documents[p]).pow(2).sum().item() for r, p in positives.items()) / len(positive),
    }


def local_statistics(world, batch, deal, dtype, row_spec, rows=None, cells=None):
    before, module.TILE_CELLS = module.TILE_CELLS, cells or module.TILE_CELLS
    try:
        local_rows = deal[world.rank]
        queries, documents, batch_info = batch.of_rank(local_rows, dtype)
        measured = [row for row in local_rows if rows is None or row < rows]
        max_rows = max(1, *(sum(rows is None or row < rows for row in part) for part in deal))
        sample = MeasuredRows(len(measured), max_rows, max(1, min(max(batch.sizes), module.MAX_DOCUMENTS)))
        return {
            name: float(v) for name, v in batch_statistics(queries, documents, batch_info, sample, row_spec).items()
        }
    finally:
        module.TILE_CELLS = before


def check(ranks, batch, deal, row_spec=ALL, dtype=torch.float64, rows=None, cells=None):
    answers = ranks(len(deal), local_statistics, batch, deal, dtype, row_spec, rows, cells)
    statistics = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    expected = textbook(batch, row_spec, rows=rows)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert statistics == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True), deal


BATCHES = {
    "pairs": vectors([1] * 9),
    "unequal": vectors([3, 1, 2, 1, 1, 4, 1, 2, 1]),
    "not of length 1": vectors([3, 1, 2, 1, 1, 4, 1, 2, 1], normalised=False),
    "duplicates": duplicates(),
    "more documents than measured": vectors([12, 1, 9, 2]),
    "rows without documents": vectors([0, 2, 0, 1, 3]),
    "one row": vectors([1]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_statistics_are_those_of_the_global_batch(ranks, name):
    batch = BATCHES[name]
    rows = list(range(len(batch.sizes)))
    for deal in ([rows], [rows[rank::2] for rank in range(2)], [rows[:1], [], rows[1:]]):
        check(ranks, batch, deal)
    check(ranks, batch, [[], rows], dtype=torch.float32)


def test_tiles_first_rows_and_row_specs(ranks):
    batch = BATCHES["unequal"]
    deal = [list(range(9))[rank::2] for rank in range(2)]
    check(ranks, batch, deal, cells=40)
    check(ranks, batch, deal, rows=5)
    check(ranks, batch, deal, row_spec=RowSpec(in_batch_negatives=False))
    check(ranks, batch, deal, row_spec=RowSpec(has_positive=False))


def test_documents_with_the_positives_id_are_no_negatives(ranks):
    batch = BATCHES["unequal"]
    ids = batch.document_keys.clone()
    ids[5] = ids[0]  # another row's document has the id of the first row's positive
    check(ranks, replace(batch, document_ids=ids), [[0, 2, 4], [1, 3, 5, 6, 7, 8]])


def test_measured_rows_are_the_first_of_the_global_batch():
    for size in (1, 2, 3, 5):
        samples = [MeasuredRows.of(10_000, 40, rank, size) for rank in range(size)]
        assert sum(sample.num_rows for sample in samples) == module.MAX_ROWS
        assert {(sample.max_rows, sample.max_documents) for sample in samples} == {(-(-module.MAX_ROWS // size), 8)}
    assert MeasuredRows.of(3, 0, 4, 5) == MeasuredRows(0, 1, 1)


def test_row_specs_of_losses():
    assert row_spec_of(InfoNCEConfig()) == RowSpec()
    assert row_spec_of(InfoNCEConfig(in_batch_negatives=False)) == RowSpec(in_batch_negatives=False)
