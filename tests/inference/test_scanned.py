"""Search of a smaller copy of the vectors: the same results as exact arithmetic on the vectors themselves."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from embedtrain.config.evaluation import IndexConfig, ScanDtype, VectorDtype, VectorPlacement
from embedtrain.errors import ConfigError
from embedtrain.inference import index as index_module
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, first_added_order, trec_order
from embedtrain.inference.store import dtype_of
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.inference.vectors import DotProduct, NegativeDistance, ScannedStore
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.kinds.sparse.score import WordScore
from embedtrain.losses.encoded import Part
from tests.evaluation.tiny import sentence_encoder
from tests.inference.test_index import exact_ranking, rows_of, sizes_of, vectors
from tests.small import text

CONFIGS = [
    IndexConfig(scan_dtype=ScanDtype.int8),
    IndexConfig(scan_dtype=ScanDtype.bf16),
    IndexConfig(dtype=VectorDtype.bf16, scan_dtype=ScanDtype.int8),
    IndexConfig(scan_dtype=ScanDtype.int8, place=VectorPlacement.host),
    IndexConfig(scan_dtype=ScanDtype.fp16, place=VectorPlacement.host),
    IndexConfig(dtype=VectorDtype.fp16, scan_dtype=ScanDtype.int8, place=VectorPlacement.host),
]


def search(world, queries, documents, ids, k, config, limit=None):
    """The ranking, scores of its documents one by one, how many score more than the last, and calls of a rescan."""
    rescanned = []
    with sizes_of(TILE=16, QUERY_BATCH_SIZE=3, QUERIES_PER_SCAN=5), pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "PENDING_CANDIDATES", 8)
        if limit is not None:
            patch.setattr(ScannedStore, "candidate_limit", lambda _self, k: limit)
        rescan = index_module.ShardSearch._rescan
        patch.setattr(
            index_module.ShardSearch, "_rescan", lambda self, *args: rescanned.append(1) or rescan(self, *args)
        )
        index = ShardedIndex(trec_order(ids), world, config)
        for batch in torch.arange(len(ids))[world.rank :: world.size].split(7):
            index.add(EncodedShard(Part(documents[batch]), batch))
        ranking = index.search(queries, k)
        above = index.count_above(queries, ranking.scores[:, -1])
        return (
            rows_of(ranking.scores, ranking.documents),
            index.scores_of(queries, ranking.documents).equal(ranking.scores),
            above.equal((ranking.scores > ranking.scores[:, -1:]).sum(dim=1)),
            len(rescanned),
        )


def check(ranks, queries, documents, k, config, sizes=(1, 2, 3), limit=None):
    """Returns the number of rescans."""
    ids = [f"{i * 37 % 1009}" for i in range(len(documents))]
    kept = documents.to(dtype_of(config)).float()
    expected, count = exact_ranking(queries, kept, ids, k), 0
    for size in sizes:
        for ranking, scores_are_equal, counts_are_equal, rescanned in ranks(
            size, search, queries, documents, ids, k, config, limit
        ):
            assert ranking == expected
            assert scores_are_equal and counts_are_equal
            count += rescanned
    return count


@pytest.mark.quick("auto-bf16-int8", "auto-fp32-bf16", "host-fp32-fp16")
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.place.value}-{config.dtype.value}-{config.scan_dtype.value}"
)
def test_results_are_those_of_the_vectors_themselves(ranks, config):
    documents = vectors(2, 200)[torch.arange(230) % 200]
    for k in (1, 9, 500):
        assert check(ranks, vectors(1, 7), documents, k, config) == 0


@pytest.mark.parametrize("scan_dtype", [ScanDtype.bf16, ScanDtype.int8])
def test_more_candidates_than_the_limit(ranks, scan_dtype):
    """The list is proved to be incomplete, and the search reads the copy again."""
    config = IndexConfig(scan_dtype=scan_dtype)
    assert check(ranks, vectors(1, 7), vectors(2, 300), 10, config, sizes=(1, 2), limit=11) > 0


@pytest.mark.parametrize("scan_dtype", list(ScanDtype))
def test_documents_closer_than_the_error_of_the_copy(ranks, scan_dtype):
    config = IndexConfig(scan_dtype=scan_dtype)
    close = unit_vectors(vectors(2, 1) + 1e-5 * vectors(3, 300))
    assert check(ranks, vectors(1, 4), close, 12, config, sizes=(1, 2), limit=40) > 0
    equal = vectors(2, 2)[torch.arange(240) % 2]
    check(ranks, vectors(1, 4), equal, 10, config, sizes=(2,), limit=40)


@pytest.mark.parametrize("scan_dtype", list(ScanDtype))
def test_vectors_of_any_length(ranks, scan_dtype):
    """One document with a large value, or a large error, does not make the search of others inexact."""
    config = IndexConfig(scan_dtype=scan_dtype)
    documents = torch.cat([vectors(2, 90) * torch.logspace(-3, 3, 90)[:, None], torch.zeros(2, 24), torch.eye(24) * 99])
    check(ranks, vectors(1, 5) * 40, documents, 9, config, sizes=(1, 2))


@pytest.mark.parametrize("scan_dtype", list(ScanDtype))
@pytest.mark.parametrize("dimensions", [1, 24, 257])
def test_the_bounds_hold_for_every_pair(scan_dtype, dimensions):
    queries = Part(vectors(1, 6, dimensions) * torch.logspace(-2, 2, 6)[:, None])
    documents = torch.cat([vectors(2, 40, dimensions), torch.eye(dimensions)[:5], torch.zeros(1, dimensions)])
    store = ScannedStore(IndexConfig(scan_dtype=scan_dtype), torch.device("cpu"), len(documents))
    store.add(Part(documents))
    ((_, tile),) = store.tiles()
    scores = tile.scores(queries).double().numpy()
    above = store.rounding_error(queries).numpy()
    below = store.deficit(queries, torch.arange(len(documents)).unsqueeze(0)).numpy()
    for row, query in enumerate(queries.values.tolist()):
        for column, document in enumerate(documents.tolist()):
            exact = float(sum(Fraction(a) * Fraction(b) for a, b in zip(query, document, strict=True)))
            rounded = float(np.float32(exact))
            assert scores[row, column] - below[row, column] <= rounded <= scores[row, column] + above[row]


def index_on_disk(world, folder, texts, scan_dtype):
    """The ranking of an index whose vectors are in files; the kinds of memory of its vectors, and forward passes."""
    encoder = sentence_encoder(world, chunk_tokens=16)
    cache = VectorCache(folder, {"model": "tiny"})
    config = IndexConfig(place=VectorPlacement.disk if folder else VectorPlacement.auto, scan_dtype=scan_dtype)
    with sizes_of(TILE=16):
        index = ShardedIndex(first_added_order(len(texts)), world, config)
        index.add_texts(encoder, texts, vector_cache=cache if folder else None)
        tiles = index._documents._vectors._tiles
        in_memory = sum(len(tile) for tile in tiles if tile.untyped_storage().resizable())
        ranking = index.search(unit_vectors(encoder.encode_all(texts[:9])), 20)
        truncated = index.truncated(5).search(unit_vectors(encoder.encode_all(texts[:9])[:, :5]), 20)
    return rows_of(ranking.scores, ranking.documents), rows_of(truncated.scores, truncated.documents), in_memory


@pytest.mark.parametrize("scan_dtype", [None, ScanDtype.int8])
def test_vectors_in_memory_mapped_files(ranks, tmp_path, scan_dtype):
    """Newly encoded, and read again by another number of ranks; only the repetitions of a text are in memory."""
    texts = [text(i, 1 + i % 13) for i in range(150)] + [text(3, 4)] * 3
    num_repeated = len(texts) - len(set(texts))
    *expected, _ = ranks(1, index_on_disk, None, texts, None)[0]
    for size in (2, 3, 1):
        results = ranks(size, index_on_disk, tmp_path, texts, scan_dtype)
        assert all([ranking, truncated] == expected for ranking, truncated, _ in results)
        assert sum(in_memory for *_, in_memory in results) == num_repeated


@pytest.mark.parametrize(
    ("comparison", "config", "message"),
    [
        (WordScore(), IndexConfig(scan_dtype=ScanDtype.int8), "index.scan_dtype=int8"),
        (WordScore(), IndexConfig(place=VectorPlacement.disk), "index.place=disk"),
        (MaxSim(mean=False), IndexConfig(place=VectorPlacement.disk), "index.place=disk"),
        (DotProduct(), IndexConfig(dtype=VectorDtype.fp16), "index.dtype=fp16: .*unit vectors"),
        (NegativeDistance(2), IndexConfig(dtype=VectorDtype.fp16), "index.dtype=fp16: .*unit vectors"),
    ],
)
def test_what_a_score_does_not_store(comparison, config, message):
    with pytest.raises(ConfigError, match=message):
        comparison.store(config, torch.device("cpu"), 1)
