"""Encoding, search and mining on the pretended device: the results of the CPU."""

import pytest
import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, Unshard, VectorPlacement
from embedtrain.config.recipe import Attention
from embedtrain.distributed.world import World
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.index import Ranking, ShardedIndex, trec_order
from tests.inference.test_index import exact_ranking, numbered, rows_of, sizes_of, vectors
from tests.mine.runs import arguments, mine, read_jsonl, rows_alone, save_model, write_jsonl
from tests.pretend_cuda.steps import Case, on_cpu
from tests.small import text


def encode(world: World, attention: Attention, unshard: Unshard) -> tuple[Tensor, Tensor]:
    """The vectors of the same texts on the device and on the CPU."""
    texts = [text(seed, 1 + seed % 7) for seed in range(12)]
    results = []
    for place in (world, on_cpu(world)):
        model = Case(attention=attention).load(place)
        encoder = SentenceEncoder.from_model(model, place, chunk_tokens=40, unshard=unshard)
        results.append(encoder.encode_all(texts).cpu())
    return results[0], results[1]


@pytest.mark.parametrize(
    ("attention", "unshard"), [(Attention.packed, Unshard.layer), (Attention.padded, Unshard.model)]
)
def test_encoding(cuda_ranks, attention, unshard):
    for device, cpu in cuda_ranks(2, encode, attention, unshard):
        assert (device - cpu).norm(dim=1).max() < 2e-2
        assert torch.pdist(cpu).max() > 0.1


def search(world: World, queries: Tensor, documents: Tensor, place: VectorPlacement) -> tuple[Ranking, Tensor]:
    """The ranking of all queries, and the scores of some documents."""
    index = ShardedIndex(trec_order(numbered(len(documents))), world, IndexConfig(place=place))
    with sizes_of(TILE=8):
        for rows in torch.arange(world.rank, len(documents), world.size).split(5):
            index.add(EncodedShard(documents[rows].to(world.device), rows))
        ranking = index.search(queries.to(world.device), 5)
        scores = index.scores_of(queries.to(world.device), ranking.documents[:, :2])
    return ranking, scores


@pytest.mark.parametrize("place", [VectorPlacement.device, VectorPlacement.host])
def test_search(cuda_ranks, place):
    queries, documents = vectors(1, 11), vectors(2, 37)
    for ranking, scores in cuda_ranks(2, search, queries, documents, place):
        assert rows_of(ranking.scores, ranking.documents) == exact_ranking(queries, documents, numbered(37), 5)
        assert torch.equal(scores, ranking.scores[:, :2])


def test_mining(cuda_ranks, ranks, tmp_path):
    """In fp32; the device's ranks mine the rows of the CPU's."""
    model = save_model(tmp_path / "model")
    rows = write_jsonl(tmp_path / "train.jsonl", rows_alone(30))
    mined = []
    for pool, name in ((cuda_ranks, "device"), (ranks, "cpu")):
        pool(2, mine, arguments(model, [rows], tmp_path / name, negatives=3))
        mined.append(read_jsonl(tmp_path / name / "train.jsonl"))
    device, cpu = mined
    assert [row["neg"] for row in device] == [row["neg"] for row in cpu]
    assert any(row["neg"] for row in cpu)
