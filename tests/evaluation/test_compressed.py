"""Searches with compressed vectors against numpy on the codes of sentence-transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sentence_transformers.util import quantize_embeddings

from embedtrain.config.parsing import parse_vectors
from embedtrain.errors import ConfigError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.metrics import parse_best_metric, set_of_metric
from embedtrain.evaluation.types import CompressedVectors, LoadedSet, metric_names
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, trec_order
from embedtrain.inference.quantised import CompressedIndex, sample_ranges, sampled_rows
from embedtrain.losses.encoded import Part
from tests.evaluation.test_evaluator import pairs, small_set
from tests.evaluation.tiny import sentence_encoder

DIMENSION, SAMPLE = 300, 50  # inner products of uint8 of so many dimensions are not exact in float32
FORMATS = parse_vectors(
    [
        "int8",
        "uint8",
        "binary",
        {"dims": 20},
        {"dims": 16, "documents": "binary"},
        {"dims": 16, "documents": "binary", "queries": "float"},
        {"dims": 20, "documents": "int8", "queries": "float"},
        {"dims": 20, "documents": "uint8", "queries": "float"},
        {"dims": 8, "documents": "binary", "rescore": {"times": 4, "top_k": 5}},
        {"documents": "binary", "rescore": {"times": 2, "documents": "float", "dims": 20}},
        {"dims": 20, "rescore": {"documents": "uint8"}},
    ],
    "vectors",
)
LABELS = [
    "int8", "uint8", "binary", "20", "16-binary", "16-binary-float-query", "20-int8-float-query",
    "20-uint8-float-query", "8-binary-x4-top5", "binary-x2-float-20", "20-float-x4-uint8",
]  # fmt: skip


def random_vectors(seed, count):
    return torch.randn(count, DIMENSION, generator=torch.Generator().manual_seed(seed)) + 0.1


def unit(vectors, dims):
    return unit_vectors(torch.as_tensor(vectors)[:, :dims]).numpy()


def ranges_of(documents, dims):
    sample = unit(documents, dims)[sampled_rows(len(documents), SAMPLE).numpy()]
    return np.stack([sample.min(0), sample.max(0)])


def scores(queries, documents, dims, precision, float_queries):
    """Integers from the codes of `quantize_embeddings`; float queries are multiplied by what codes stand for."""
    left, right = unit(queries, dims), unit(documents, dims)
    if precision == "float":
        return (left.astype(np.float64) @ right.T.astype(np.float64)).astype(np.float32)
    ranges = ranges_of(documents, dims)

    def codes(vectors):
        if precision != "binary":
            return quantize_embeddings(vectors, precision, ranges=ranges).astype(np.int32)
        bits = np.unpackbits(quantize_embeddings(vectors, "ubinary"), axis=-1)[:, : vectors.shape[1]]
        return 2 * bits.astype(np.int32) - 1

    if not float_queries:
        return codes(left) @ codes(right).T
    meant = codes(right).astype(np.float32)
    if precision != "binary":
        steps = (ranges[1] - ranges[0]) / np.float32(255)
        meant = ranges[0] + (meant + np.float32(0.5 + 128 * (precision == "int8"))) * steps
    return (left.astype(np.float64) @ meant.T.astype(np.float64)).astype(np.float32)


def expected_ranking(queries, documents, ids, vectors, k):
    first = scores(queries, documents, vectors.dims, vectors.documents.value, vectors.has_float_queries)
    by_id = sorted(range(len(ids)), key=lambda number: ids[number], reverse=True)
    order = np.array([sorted(by_id, key=lambda number: -row[number]) for row in first])
    if vectors.rescore is not None:
        again = scores(queries, documents, vectors.rescore.dims, vectors.rescore.documents.value, float_queries=True)
        size = vectors.rescore.times * vectors.rescore.top_k
        for number, row in enumerate(order):
            head = set(row[:size].tolist())
            order[number, :size] = sorted(
                [each for each in by_id if each in head], key=lambda each: -again[number, each]
            )
    return order[:, :k]


def search(world, queries, documents, ids, k):
    index = ShardedIndex(trec_order(ids), world)
    rows = torch.arange(world.rank, len(ids), world.size)
    for batch in rows.split(7):
        index.add(EncodedShard(Part(unit_vectors(documents[batch])), batch))
    ranges = {dims: sample_ranges(index, dims, SAMPLE) for dims in (8, 16, 20, DIMENSION)}
    return [
        CompressedIndex(index, vectors, DIMENSION, ranges.__getitem__).search(queries, k).documents.numpy()
        for vectors in FORMATS
    ]


def test_searches_are_those_of_numpy_on_any_number_of_ranks(ranks):
    queries, documents = random_vectors(0, 6), random_vectors(1, 113)
    documents[60:] = documents[:53]  # ties
    ids = [f"d{number}" for number in range(113)]
    assert [vectors.label for vectors in FORMATS] == LABELS
    for results in (*ranks(1, search, queries, documents, ids, 30), *ranks(3, search, queries, documents, ids, 30)):
        for vectors, ranking in zip(FORMATS, results, strict=True):
            expected = expected_ranking(queries, documents, ids, vectors, 30)
            assert (ranking == expected).all(), vectors.label


def test_the_sample_of_documents_is_fixed_and_spread():
    small, large = sampled_rows(1000, 100), sampled_rows(1000, 200)
    assert small.sum() == 100
    assert (large & small).equal(small), "a larger sample contains a smaller one"
    assert 30 < int(small[:500].sum()) < 70
    assert sampled_rows(5, 10).all()


def evaluate(world, sets):
    formats = parse_vectors(["int8", {"dims": 8, "documents": "binary", "rescore": {"times": 2}}, {"dims": 16}], "v")
    encoder = sentence_encoder(world)
    evaluator = Evaluator(sets, encoder, world, truncate_dims=[16], compressed=CompressedVectors(formats))
    results, passes = evaluator.evaluate(), encoder.encoder.forwards
    Evaluator(sets, encoder, world).evaluate()
    names = {name: tuple(metrics) for name, metrics in results.items()}
    assert names == metric_names(sets, [16, *formats])
    rows = {name: info.as_row() for name, info in evaluator.datasets.items()}
    return results, rows, (passes, encoder.encoder.forwards - passes)


def test_retrieval_sets_are_measured_in_every_form_without_encoding_again(ranks):
    sets = [
        LoadedSet(small_set()),
        LoadedSet(pairs()),
        LoadedSet(replace(small_set(5, 9), name="other")),
    ]
    answers = [ranks(size, evaluate, sets)[0] for size in (1, 3)]
    results, rows, passes = answers[0]
    assert results == answers[1][0], "on any number of ranks"
    assert passes[0] == passes[1]
    assert set(results) == {
        "small", "small@16", "small@int8", "small@8-binary-x2", "pairs", "pairs@16", "other", "other@16",
        "other@int8", "other@8-binary-x2", "mean", "mean@16", "mean@int8", "mean@8-binary-x2",
    }  # fmt: skip
    sizes = {name: (row["vectors"]["bytes"], row["vectors"]["rescore_bytes"]) for name, row in rows.items()}
    assert sizes["small"] == (128, 0)
    assert sizes["small@16"] == (64, 0)
    assert sizes["small@int8"] == (32, 0)
    assert sizes["mean@8-binary-x2"] == (1, 32)
    assert results["mean@int8"]["ndcg@10"] == pytest.approx(
        (results["small@int8"]["ndcg@10"] + results["other@int8"]["ndcg@10"]) / 2
    )
    names = metric_names(sets, FORMATS)
    assert parse_best_metric("small@8-binary-x4-top5/ndcg@10", names) == ("small@8-binary-x4-top5", "ndcg@10")
    assert {set_of_metric(f"small@{label}/ndcg@10") for label in LABELS} == {"small"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["int8", {"documents": "int8"}], r"v\[1\].*v\[0\]"),
        (["int4"], r"v\[0\].*int4"),
        (["float"], r"v\[0\]\.documents=float"),
        ([{"dims": 0}], r"v\[0\]\.dims=0"),
        ([{"documents": "int8", "queries": "binary"}], r"v\[0\]\.queries=binary"),
        ([{"documents": "binary", "rescore": {"documents": "binary"}}], r"v\[0\]\.rescore\.documents=binary"),
        ([{"documents": "binary", "rescore": {"times": 0}}], r"v\[0\]\.rescore\.times=0"),
        ([{"documents": "binary", "rescoring": {}}], r"rescoring"),
        ([3], r"v\[0\]=3"),
        (3, r"v=3"),
    ],
)
def test_forms_that_cannot_be(value, message):
    with pytest.raises(ConfigError, match=message):
        parse_vectors(value, "v")
