"""Exact search with vectors on the device and on the host, against exact arithmetic."""

import pytest
import torch

from embedtrain.config.evaluation import IndexConfig, VectorDtype, VectorPlacement
from embedtrain.distributed.world import World
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.index import ShardedIndex, trec_order
from embedtrain.losses.encoded import Part
from tests.inference.test_index import exact_ranking, rows_of, sizes_of, vectors


def search(
    world: World, placement: VectorPlacement, k: int, dtype: VectorDtype = VectorDtype.fp32
) -> list[list[tuple[float, int]]]:
    """Rankings of 12 queries over 100 documents, of which every seventh is a copy of another; tiles of 16 documents."""
    queries, documents, ids = texts()
    rows = torch.arange(world.rank, len(ids), world.size)
    with sizes_of(TILE=16, QUERY_BATCH_SIZE=5):
        index = ShardedIndex(trec_order(ids), world, IndexConfig(place=placement, dtype=dtype))
        for part in rows.split(13):
            index.add(EncodedShard(Part(documents[part].to(world.device)), part))
        ranking = index.search(queries.to(world.device), k)
    return rows_of(ranking.scores.cpu(), ranking.documents.cpu())


def texts() -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    documents = vectors(1, 100)
    documents[::7] = documents[3]
    return vectors(2, 12), documents, [f"d{number}" for number in range(100)]


@pytest.mark.parametrize("size", [1, 2])
def test_search_is_exact(device_ranks, size):
    queries, documents, ids = texts()
    expected = exact_ranking(queries, documents, ids, 40)
    for placement in (VectorPlacement.auto, VectorPlacement.device, VectorPlacement.host):
        for k in (1, 40):
            for ranking in device_ranks(size, search, placement, k):
                assert ranking == [row[:k] for row in expected]


def test_vectors_in_bf16(device_ranks):
    """Scores are those of the rounded vectors."""
    queries, documents, ids = texts()
    expected = exact_ranking(queries, documents.bfloat16().float(), ids, 10)
    for placement in (VectorPlacement.auto, VectorPlacement.device, VectorPlacement.host):
        (ranking,) = device_ranks(1, search, placement, 10, VectorDtype.bf16)
        assert ranking == expected
