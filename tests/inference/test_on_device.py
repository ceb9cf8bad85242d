"""Encoding, evaluation, mining and search on a pretended GPU: the host waits once per block of chunks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from embedtrain.config.evaluation import IndexConfig, VectorPlacement
from embedtrain.config.recipe import Precision, Strategy
from embedtrain.distributed.world import World
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.types import Bitext, ClassificationSet, ClusteringSet, LabelledPairs, LoadedSet
from embedtrain.inference import encode, store
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.inference.loading.load import load_model
from tests.evaluation.test_evaluator import pairs, small_set
from tests.mine.runs import arguments, mine, read_jsonl, rows_alone, save_model, write_jsonl
from tests.pretend_cuda.device import host_reads
from tests.small import parallel, small_model, small_tokenizer, text

TEXTS = [text(i, 1 + i % 9) for i in range(60)]
QUERIES = 10


def small_blocks(world: World, patch: pytest.MonkeyPatch) -> SentenceEncoder:
    patch.setattr(encode, "CHUNKS_PER_BLOCK", 4)
    patch.setattr(store, "TILE", 8)
    layout = parallel(Strategy.fsdp, precision=Precision.fp32)
    model = load_model(small_model("xlm-roberta"), layout, world, seed=0, tokenizer=small_tokenizer())
    return SentenceEncoder.from_model(model, world, chunk_tokens=16)


def reads_per_block(world: World) -> tuple[dict[str, int], int]:
    """What makes the host wait from the second block to the end of the index, and the number of these blocks."""
    with pytest.MonkeyPatch.context() as patch:
        encoder = small_blocks(world, patch)
        documents = ShardedIndex(first_added_order(len(TEXTS)), world, IndexConfig(place=VectorPlacement.host))
        blocks = encoder.encode_blocks(TEXTS)
        documents.add(next(blocks))
        count = 0
        with host_reads() as reads:
            for block in blocks:
                documents.add(block)
                count += 1
    return dict(reads), count


@pytest.mark.quick("2")
@pytest.mark.parametrize("size", [1, 2])
def test_the_host_waits_once_per_block(cuda_ranks, size):
    for reads, count in cuda_ranks(size, reads_per_block):
        assert count >= 3
        assert sum(reads.values()) == count, reads


def search(world: World, placement: VectorPlacement) -> tuple[torch.Tensor, ...]:
    with pytest.MonkeyPatch.context() as patch:
        encoder = small_blocks(world, patch)
        documents = ShardedIndex(first_added_order(len(TEXTS) + 3), world, IndexConfig(place=placement))
        documents.add_texts(encoder, [*TEXTS, *TEXTS[:3]])  # with duplicates
        vectors = encoder.encode_all(TEXTS)
        queries = unit_vectors(vectors[:QUERIES])
        ranking = documents.search(queries, 5)
        scores = documents.scores_of(queries, ranking.documents)
    assert vectors.device.type == world.device.type
    return tuple(values.cpu() for values in (vectors, ranking.scores, ranking.documents, scores))


@pytest.mark.quick("device")
@pytest.mark.parametrize("placement", [VectorPlacement.device, VectorPlacement.host])
def test_search_on_a_device_gives_what_it_gives_on_the_cpu(ranks, cuda_ranks, placement):
    expected: Any = ranks(2, search, placement)
    results: Any = cuda_ranks(2, search, placement)
    for on_cpu, on_device in zip(expected, results, strict=True):
        torch.testing.assert_close(on_device, on_cpu, atol=1e-5, rtol=0)
        assert on_device[1].equal(on_device[3]), "scores_of gives the scores of the search"


def metrics_of_all_kinds(world: World) -> dict[str, dict[str, float]]:
    retrieval, texts, classes = small_set(), [text(i, 4) for i in range(12)], [i % 2 for i in range(12)]
    candidates = {query: [0, 1, 2] for query in retrieval.queries}
    sets = [
        retrieval,
        dataclasses.replace(retrieval, name="reranking", candidates=candidates),
        pairs(),
        LabelledPairs("labelled", texts[:6], texts[6:], classes[:6]),
        Bitext("bitext", texts[:6], texts[6:]),
        ClassificationSet("classes", texts[:8], classes[:8], texts[8:], classes[8:]),
        ClusteringSet("clusters", texts, [[label] for label in classes]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        encoder = small_blocks(world, patch)
        return Evaluator([LoadedSet(data) for data in sets], encoder, world).evaluate()


@pytest.mark.slow  # in a run: tests/pretend_cuda/test_run.py
def test_evaluation_on_a_device_gives_what_it_gives_on_the_cpu(ranks, cuda_ranks):
    (expected,), (results,) = ranks(1, metrics_of_all_kinds), cuda_ranks(1, metrics_of_all_kinds)
    assert results.keys() == expected.keys()
    for name, metrics in expected.items():
        assert results[name] == pytest.approx(metrics, abs=1e-4), name


def test_mining_on_a_device_gives_what_it_gives_on_the_cpu(ranks, cuda_ranks, tmp_path: Path):
    model, teacher = save_model(tmp_path / "model"), save_model(tmp_path / "teacher", seed=1)
    data = write_jsonl(tmp_path / "rows.jsonl", rows_alone(12))
    for pool, folder in ((ranks, "cpu"), (cuda_ranks, "cuda")):
        pool(1, mine, arguments(model, [data], tmp_path / folder, teacher=teacher, negatives=3))
    expected, results = (read_jsonl(tmp_path / folder / data.name) for folder in ("cpu", "cuda"))
    assert [row["neg"] for row in results] == [row["neg"] for row in expected]
    assert all(len(row["neg"]) == 3 for row in results)
