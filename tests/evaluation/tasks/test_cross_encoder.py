"""Cross-encoders on sets: sentence-transformers' evaluator and pytrec_eval on the same scores, and first stages."""

from dataclasses import replace

import numpy as np
import pytest
import pytrec_eval
import torch
from datasets import Dataset
from scipy import stats
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

from embedtrain.errors import DataError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.first_stage import (
    BM25,
    bm25_rankings,
    first_stage_note,
    read_run,
    with_candidates,
    with_candidates_of,
    with_rankings,
    words,
)
from embedtrain.evaluation.metrics import RETRIEVAL_METRICS
from embedtrain.evaluation.types import Bitext, Corpus, LabelledPairs, LoadedSet, RetrievalSet, ScoredPairs
from tests.evaluation.tasks.test_reranking import plain_set
from tests.evaluation.tiny import pair_scorer, save_tiny_cross_encoder, sentence_encoder
from tests.small import text


def measured(world, sets, folder=None):
    return Evaluator(sets, pair_scorer(world), world).evaluate(save_runs=folder)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    directory = save_tiny_cross_encoder(tmp_path_factory.mktemp("cross") / "model")
    return CrossEncoder(str(directory), device="cpu", max_length=24, activation_fn=torch.nn.Identity())


def test_reranking_equals_sentence_transformers_and_trec_eval_on_any_number_of_ranks(ranks, theirs, tmp_path):
    data = plain_set()
    sets = [LoadedSet(data, metrics=("map", "mrr@10", "ndcg@10", "recall@3"))]
    results = [result for size in (1, 2, 3) for result in ranks(size, measured, sets, tmp_path)]
    assert all(result == results[0] for result in results)
    texts = dict(zip(data.documents.ids, data.documents.texts, strict=True))
    samples = [
        {
            "query": words,
            "positive": [texts[document] for document, gain in data.judgements[query].items() if gain],
            "negative": [texts[document] for document, gain in data.judgements[query].items() if not gain],
        }
        for query, words in data.queries.items()
    ]
    expected = CrossEncoderRerankingEvaluator(samples, at_k=10, show_progress_bar=False, write_csv=False)(theirs)
    for metric in ("map", "mrr@10", "ndcg@10"):
        assert results[0]["plain"][metric] == pytest.approx(expected[metric], abs=1e-9)
    run = {query: {} for query in data.queries}
    for query, candidates in data.candidates.items():
        pairs = [(data.queries[query], data.documents.texts[number]) for number in candidates]
        scores = theirs.predict(pairs, show_progress_bar=False).tolist()
        run[query] = {data.documents.ids[n]: score for n, score in zip(candidates, scores, strict=True)}
    per_query = pytrec_eval.RelevanceEvaluator(data.judgements, {"map", "ndcg_cut.10", "recall.3"}).evaluate(run)
    for ours, name in (("map", "map"), ("ndcg@10", "ndcg_cut_10"), ("recall@3", "recall_3")):
        mean = np.mean([values[name] for values in per_query.values()])
        assert results[0]["plain"][ours] == pytest.approx(mean, abs=1e-9)
    written = [line.split() for line in (tmp_path / "plain.run").read_text().splitlines()]
    assert float(written[0][4]) == pytest.approx(max(run[written[0][0]].values()), abs=1e-6), "no sigmoid"


def test_reranking_equals_mteb(ranks, theirs, monkeypatch):
    """A reranking task of mteb with the same candidates, whose cross-encoder applies a sigmoid."""
    mteb = pytest.importorskip("mteb")
    from mteb.mocks import mock_tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = plain_set()
    names = data.documents.ids
    collection = {
        "corpus": Dataset.from_dict({"id": names, "title": [""] * len(names), "text": list(data.documents.texts)}),
        "queries": Dataset.from_dict({"id": list(data.queries), "text": list(data.queries.values())}),
        "relevant_docs": data.judgements,
        "top_ranked": {query: [names[number] for number in of_query] for query, of_query in data.candidates.items()},
    }

    class Task(mock_tasks.MockRerankingTask):
        def load_data(self, num_proc=None, **_):
            self.dataset, self.data_loaded = {"default": {"test": collection}}, True

    model = CrossEncoder(theirs.config._name_or_path, device="cpu", max_length=24)
    (result,) = mteb.evaluate(model, Task(), cache=None, co2_tracker=False, show_progress_bar=False).task_results
    (expected,) = result.scores["test"]
    metrics = {"ndcg@10": "ndcg_at_10", "ndcg@3": "ndcg_at_3", "map@10": "map_at_10", "recall@3": "recall_at_3"}
    (measured_by_us,) = ranks(1, measured, [LoadedSet(data, metrics=tuple(metrics))])
    for ours, name in metrics.items():
        assert measured_by_us["plain"][ours] == pytest.approx(expected[name], abs=1e-5)  # mteb rounds to five digits


class _SaturatedScorer:
    """Scores that a sigmoid makes equal in float32."""

    def __init__(self, world):
        self.scorer = pair_scorer(world)

    def __call__(self, *_texts, **_prompts):
        return torch.tensor([40.0, 40.0001, 40.0002])


def saturated(world):
    scorer = pair_scorer(world)
    scorer.score = _SaturatedScorer(world)
    assert torch.sigmoid(torch.tensor([40.0, 40.0002])).unique().numel() == 1
    data = RetrievalSet(
        "top", {"q": "alpha"}, Corpus(["c", "b", "a"], ["beta", "gamma", "delta"]), {"q": {"a": 1}}, {"q": [0, 1, 2]}
    )
    return Evaluator([LoadedSet(data)], scorer, world).evaluate()["top"]["map"]


def test_distinct_scores_stay_distinct(ranks):
    """The best scores differ in float32; after a sigmoid they tie, and the best document is only found by luck."""
    assert ranks(1, saturated) == [1.0]


def test_pairs_with_scores_and_labels(ranks, theirs):
    first, second = [text(i, 3) for i in range(20)], [text(40 + i, 4) for i in range(20)]
    scored = LoadedSet(ScoredPairs("sts", first, second, [i % 6 for i in range(20)]))
    labelled = LoadedSet(LabelledPairs("same", first, second, [i % 2 for i in range(20)]))
    results = [result for size in (1, 2) for result in ranks(size, measured, [scored, labelled])]
    assert all(result == results[0] for result in results)
    scores = theirs.predict(list(zip(first, second, strict=True)), show_progress_bar=False)
    assert results[0]["sts"]["spearman"] == pytest.approx(stats.spearmanr(scores, scored.data.scores).statistic)
    from sklearn.metrics import average_precision_score

    assert results[0]["same"]["ap"] == pytest.approx(average_precision_score(labelled.data.labels, scores))


def prepared(world, sets, depth):
    return with_candidates_of(sets, world, depth)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (LoadedSet(Bitext("two", ["a"], ["b"])), "evaluation.sets: two .*bitext"),
        (
            LoadedSet(ScoredPairs("s", ["a"], ["b"], [1.0]), query_max_length=9),
            "evaluation.sets, s: query_max_length=9",
        ),
    ],
    ids=["kind", "length"],
)
def test_sets_of_vectors_are_rejected(ranks, loaded, message):
    with pytest.raises(AssertionError, match=f"ConfigError: {message}"):
        ranks(1, prepared, [loaded], 10)


def measured_run(world, loaded, depth):
    (loaded,) = with_candidates_of([loaded], world, depth)
    return loaded, Evaluator([loaded], None, world).evaluate()["dev"]


def test_a_run_is_cut_at_its_best_documents(ranks, tmp_path):
    documents = Corpus(["a", "b", "c", "d"], ["one", "two", "three", "four"])
    data = RetrievalSet("dev", {"q": "what"}, documents, {"q": {"d": 1, "a": 1}})
    (tmp_path / "some.run").write_text("q Q0 a 1 0.5 x\nq Q0 d 2 2 x\nq Q0 b 3 0.5 x\nq Q0 c 4 -1 x\n")
    data, _ = with_candidates(data, read_run(tmp_path / "some.run"), "run", first_stage="run")
    ((loaded, metrics),) = ranks(1, measured_run, LoadedSet(data), 2)
    ids = loaded.data.documents.ids
    assert [ids[number] for number in loaded.data.candidates["q"]] == ["d", "b"], "ties by descending id"
    assert loaded.metrics == RETRIEVAL_METRICS
    assert (metrics["mrr@10"], metrics["recall@10"]) == (1.0, 0.5), "a relevant document that is missing is not added"
    assert "50.0%" in first_stage_note(replace(loaded, first_stage_metrics=metrics))
    (tmp_path / "bad.run").write_text("q Q0 a 1 much x\n")
    with pytest.raises(DataError, match=r"bad.run:1: .*much"):
        read_run(tmp_path / "bad.run")


def test_the_query_is_not_among_its_best_documents():
    data = RetrievalSet("dev", {"a": "x"}, Corpus(["a", "b", "c"], list("xyz")), {"a": {"b": 1}})
    best = with_rankings(LoadedSet(replace(data, ignore_identical_ids=True)), {"a": [0, 1, 2]}, BM25, 1)
    assert best.data.documents.ids == ["b"]


def test_words_of_all_languages():
    assert words("Über snake_case, 3.5 YUV 缩放库 库 グラフ") == [
        "über", "snake_case", "3", "5", "yuv", "缩放", "放库", "库", "グラ", "ラフ",
    ]  # fmt: skip


def test_bm25_is_that_of_lucene_with_ties_by_id():
    pytest.importorskip("bm25s")
    texts = ["alpha beta beta", "alpha", "gamma 缩放库", "", "alpha", "beta"]
    documents = Corpus(["d0", "d1", "d2", "d3", "d4", "d5"], texts)
    queries = ["alpha beta", "放库", "unknown", "", "alpha"]
    assert bm25_rankings(queries, documents, 10)[1:] == [[2], [], [], [4, 1, 0]]
    terms, lengths = [words(each) for each in texts], [len(words(each)) for each in texts]
    expected = []
    for own in terms:
        score = 0.0
        for term in ("alpha", "beta"):
            actual = sum(term in each for each in terms)
            idf, tf = np.log(1 + (6 - actual + 0.5) / (actual + 0.5)), own.count(term)
            score += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(own) / np.mean(lengths)))
        expected.append(score)
    order = sorted((i for i in range(6) if expected[i] > 0), key=lambda i: (-expected[i], -i))
    assert bm25_rankings(["alpha beta"], documents, 10) == [order]
    assert bm25_rankings(["alpha"], documents, 1) == [[4]], "of equal scores the last id, as in trec_eval"
    assert bm25_rankings(["alpha"], Corpus(["d"], ["!"]), 1) == [[]]


def two_stages(world, data, folder):
    """A bi-encoder's best documents, reranked: metrics of both stages, and of the same documents from its run file."""
    searched = Evaluator([LoadedSet(data)], sentence_encoder(world), world, keep_rankings=5)
    metrics = searched.evaluate(save_runs=folder)
    best = with_rankings(LoadedSet(data), searched.rankings["plain"], "model", 5)
    reranked = Evaluator([best], pair_scorer(world), world, suffix="+reranker").evaluate()
    run, _ = with_candidates(data, read_run(folder / "plain.run"), "run", first_stage="run")
    from_run = Evaluator(with_candidates_of([LoadedSet(run)], world, 5), pair_scorer(world), world).evaluate()
    return metrics, reranked, from_run


def test_the_best_documents_of_a_bi_encoder_are_reranked(ranks, tmp_path):
    data = replace(plain_set(), candidates=None)
    results = [result for size in (1, 3) for result in ranks(size, two_stages, data, tmp_path)]
    assert all(result == results[0] for result in results)
    before, after, from_run = results[0]
    assert after["plain+reranker"] == from_run["plain"]
    assert before["plain"]["recall@10"] >= after["plain+reranker"]["recall@10"]
    assert before["plain"] != after["plain+reranker"]


def test_bm25_is_searched_on_one_rank_for_all(ranks):
    pytest.importorskip("bm25s")
    data = replace(plain_set(), candidates=None)
    results = [result for size in (1, 3) for result in ranks(size, prepared, [LoadedSet(data)], 4)]
    candidates = [result[0].data.candidates for result in results]
    assert all(each == candidates[0] for each in candidates)
    assert max(map(len, candidates[0].values())) == 4
    assert results[0][0].data.first_stage == BM25
