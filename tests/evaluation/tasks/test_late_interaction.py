"""Evaluation with a vector per token, against sentence-transformers' evaluators of such models."""

from dataclasses import replace

import numpy as np
import pytest
import pytrec_eval
import torch
from sentence_transformers.multi_vector_encoder import evaluation as st
from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling
from sentence_transformers.util import maxsim, maxsim_pairwise

from embedtrain.config.evaluation import IndexConfig, ScanDtype, VectorDtype
from embedtrain.config.kinds import load_kind
from embedtrain.errors import ConfigError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.metrics import sts_metrics
from embedtrain.evaluation.sentence_transformers import SentenceTransformersAdapter
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    LabelledPairs,
    LoadedSet,
    check_sets_of_kind,
)
from tests.evaluation.tasks.test_bitext import bitext
from tests.evaluation.tasks.test_reranking import plain_set
from tests.evaluation.test_evaluator import pairs
from tests.evaluation.tiny import token_encoder

PROMPTS = {"query_prompt": "beta ", "document_prompt": "nu "}
METRICS = ("ndcg@10", "mrr@10", "map@100", "recall@3")


def all_sets():
    """Of all kinds that vectors of tokens can measure, without ties."""
    data, scored = plain_set(), pairs()
    labelled = LabelledPairs("labelled", scored.first, scored.second, [i % 2 for i in range(len(scored.first))])
    searched = LoadedSet(replace(data, name="searched", candidates=None), metrics=METRICS)
    return [searched, LoadedSet(data), LoadedSet(scored), LoadedSet(labelled), LoadedSet(bitext())]


def measure(world):
    evaluator = Evaluator(all_sets(), token_encoder(world, **PROMPTS), world, truncate_dims=[4])
    return evaluator.evaluate()


def their_metrics(world, folder):
    """Those of sentence-transformers on the same model, and the vectors of each role."""
    data, scored, translated = plain_set(), pairs(), bitext()
    model = SentenceTransformersAdapter(token_encoder(world, **PROMPTS))
    text_of = dict(zip(data.documents.ids, data.documents.texts, strict=True))
    relevant = {query: {d for d, gain in gains.items() if gain} for query, gains in data.judgements.items()}
    retrieval = st.MultiVectorInformationRetrievalEvaluator(
        data.queries, text_of, relevant, name="set", mrr_at_k=[10], ndcg_at_k=[10], map_at_k=[100],
        precision_recall_at_k=[3],
    )  # fmt: skip
    samples = [
        {
            "query": words,
            "positive": [text_of[d] for d in gains if gains[d]],
            "negative": [text_of[d] for d in gains if not gains[d]],
        }
        for query, words in data.queries.items()
        for gains in [data.judgements[query]]
    ]
    reranking = st.MultiVectorRerankingEvaluator(samples, at_k=10)
    scores = maxsim_pairwise(
        model.encode_query(scored.first, convert_to_tensor=True),
        model.encode_document(scored.second, convert_to_tensor=True),
    )
    of_pairs = maxsim(
        model.encode_query(translated.first, convert_to_tensor=True),
        model.encode_document(translated.second, convert_to_tensor=True),
    )
    return retrieval(model), reranking(model), scores.tolist(), of_pairs.tolist()


def test_metrics_equal_sentence_transformers_on_any_number_of_ranks(ranks, tmp_path):
    results = [result for size in (1, 2, 3) for result in ranks(size, measure)]
    assert all(result == results[0] for result in results)
    (metrics, *_) = results
    retrieval, reranking, scores, of_pairs = ranks(1, their_metrics, tmp_path)[0]
    for name in METRICS:
        assert metrics["searched"][name] == pytest.approx(retrieval[f"set_maxsim_{name}"], abs=1e-6), name
    assert 0.1 < metrics["searched"]["ndcg@10"] < 0.9
    assert metrics["plain"] == pytest.approx({name: reranking[name] for name in metrics["plain"]}, abs=1e-6)
    assert metrics["pairs"] == pytest.approx(sts_metrics(scores, pairs().scores), abs=1e-6)
    # The first of equally near sentences counts.
    nearest = torch.tensor(of_pairs).argmax(dim=1).tolist()
    right = sum(row == index for index, row in enumerate(nearest))
    assert metrics["bitext"]["accuracy"] == pytest.approx(right / len(nearest))
    assert metrics["searched@4"] != metrics["searched"]
    assert {name.removesuffix("@4") for name in metrics} == {"searched", "plain", "pairs", "labelled", "bitext", "mean"}


INDICES = [
    IndexConfig(),
    IndexConfig(dtype=VectorDtype.fp16, token_pooling=2, scan_dtype=ScanDtype.int8),
    IndexConfig(first_stage=6, first_stage_pooling=3),
]


def measure_indices(world):
    searched = [replace(all_sets()[0], metrics=("ndcg@10", "recall@3"))]
    encoder = token_encoder(world, **PROMPTS)
    return [Evaluator(searched, encoder, world, index=index).evaluate()["searched"] for index in INDICES]


def vectors_of(world):
    data, model = plain_set(), SentenceTransformersAdapter(token_encoder(world, **PROMPTS))
    return model.encode_query([data.queries[q] for q in data.judgements]), model.encode_document(data.documents.texts)


def test_metrics_equal_pytrec_eval_with_each_index(ranks):
    """Of scores in float64 of the same vectors: all, those pooled and in fp16, and all of the documents found first."""
    results = [result for size in (1, 2, 3) for result in ranks(size, measure_indices)]
    assert all(result == results[0] for result in results)
    data, (queries, documents) = plain_set(), ranks(1, vectors_of)[0]

    def pooled(factor):
        pooling = HierarchicalTokenPooling(pool_factor=factor)
        return [torch.nn.functional.normalize(pooling.pool_one(torch.as_tensor(rows)), dim=1) for rows in documents]

    def scores(rows):
        of_pairs = [[float((np.float64(q) @ np.float64(d).T).max(1).sum()) for d in rows] for q in queries]
        return np.float32(of_pairs)

    exact = scores(documents)
    found = np.argsort(-scores(pooled(3.0)), axis=1)[:, :10]  # as many as the metrics need
    restricted = np.full_like(exact, -np.inf)
    np.put_along_axis(restricted, found, np.take_along_axis(exact, found, axis=1), axis=1)
    names = {"ndcg@10": "ndcg_cut_10", "recall@3": "recall_3"}
    evaluator = pytrec_eval.RelevanceEvaluator(data.judgements, {"ndcg_cut.10", "recall.3"})
    for result, of_index in zip(results[0], (exact, scores([d.half() for d in pooled(2.0)]), restricted), strict=True):
        run = {
            query: {d: float(s) for d, s in zip(data.documents.ids, row, strict=True) if np.isfinite(s)}
            for query, row in zip(data.judgements, of_index, strict=True)
        }
        values = evaluator.evaluate(run).values()
        for ours, theirs in names.items():
            assert result[ours] == pytest.approx(np.mean([of_query[theirs] for of_query in values]), abs=1e-9), ours
    best = np.argsort(-exact, axis=1)[:, :10]
    recall = np.mean([len(set(row) & set(of_first)) / 10 for row, of_first in zip(best, found, strict=True)])
    assert 0.2 < recall < 1
    assert results[0][2]["first_stage_recall@10"] == pytest.approx(recall)
    assert [len(result) for result in results[0]] == [2, 2, 3]


def what_encode_gives(world):
    model, texts = SentenceTransformersAdapter(token_encoder(world, mean=True, **PROMPTS)), ["alpha", "mu nu xi"]
    queries, documents = model.encode_query(texts), model.encode_document(texts, convert_to_tensor=True)
    assert [tuple(rows.shape) for rows in queries] == [(9, 16)] * 2
    assert [tuple(rows.shape) for rows in documents] == [(3, 16), (6, 16)]  # prompt and first token, without alpha
    assert model.encode_document(texts[1]).shape == (6, 16)
    assert model.similarity_fn_name == "meanmaxsim"
    torch.testing.assert_close(
        model.similarity(queries, documents).diagonal(), model.similarity_pairwise(queries, documents)
    )
    for wrong in ({"precision": "int8"}, {"output_value": "sentence_embedding"}):
        with pytest.raises(ConfigError, match=next(iter(wrong.values()))):
            model.encode(texts, **wrong)
    return model.get_embedding_dimension()


def test_encode_returns_the_vectors_of_each_text(ranks):
    assert ranks(1, what_encode_gives) == [16]


@pytest.mark.parametrize(
    "data",
    [
        ClassificationSet("moods", ["a", "b"], ["x", "y"], ["c"], ["x"]),
        ClusteringSet("topics", ["a", "b"], [["x"], ["y"]]),
    ],
    ids=["classification", "clustering"],
)
def test_sets_that_need_a_vector_per_text_are_rejected(data):
    bitext_set = LoadedSet(Bitext("b", ["a"], ["b"]))
    with pytest.raises(
        ConfigError, match=f"evaluation.sets: {data.name} .*late_interaction computes a vector per token"
    ):
        check_sets_of_kind([bitext_set, LoadedSet(data)], load_kind("late_interaction"), "evaluation.sets")
    check_sets_of_kind([bitext_set, LoadedSet(data)], load_kind("dense"), "evaluation.sets")
