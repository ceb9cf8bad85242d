"""Retrieval against MTEB's metrics on the same vectors: every family of metrics, and the sets that are odd."""

from dataclasses import replace

import pytest
from mteb._evaluators.retrieval_metrics import hole
from mteb.abstasks import AbsTaskRetrieval

from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.tasks import run_path
from embedtrain.evaluation.types import Corpus, LoadedSet, RetrievalSet
from tests.evaluation.tasks.mteb_reference import encoded, on_any_ranks, retrieval_data, scores_of_task, task_of
from tests.evaluation.tiny import sentence_encoder
from tests.small import text

# Our name of each of MTEB's metrics.
FAMILIES = {
    "ndcg": "ndcg", "map": "map", "mrr": "mrr", "recall": "recall", "precision": "precision", "hit": "hit_rate",
}  # fmt: skip
CUTS = (1, 3, 10, 100)
METRICS = tuple(f"{family}@{k}" for family in (*FAMILIES, "hole") for k in CUTS)


def odd_set(ids="d{:02}"):
    """Equal documents, so scores tie; queries whose judgements are all 0, are of documents elsewhere, or are none."""
    texts = [text(i, 2 + i % 6) for i in range(23)]
    for copy, of in [(5, 2), (11, 2), (20, 2), (7, 3), (19, 3)]:
        texts[copy] = texts[of]
    documents = Corpus([ids.format(i) for i in range(23)], texts)
    queries = {f"q{i}": text(60 + i, 3) for i in range(10)} | {"q10": texts[2]}
    judgements = {
        f"q{i}": {ids.format(i * 3 % 23): 1, ids.format((i + 4) % 23): 2, ids.format((i + 9) % 23): 0}
        for i in range(10)
    }
    judgements |= {"q1": {ids.format(4): 0, ids.format(6): 0}, "q2": {"elsewhere": 1}, "q10": {ids.format(5): 1}}
    del judgements["q3"]
    return RetrievalSet("odd", queries, documents, judgements)


def theirs_of(ranks, data):
    vectors = ranks(1, encoded, [*data.queries.values(), *data.documents.texts])[0]
    task = task_of(
        AbsTaskRetrieval, "Retrieval", "ndcg_at_10", retrieval_data(data),
        k_values=CUTS, ignore_identical_ids=data.ignore_identical_ids,
    )  # fmt: skip
    scores = scores_of_task(task, vectors)
    return {f"{family}@{k}": scores[f"{theirs}_at_{k}"] for family, theirs in FAMILIES.items() for k in CUTS}


def test_metrics_equal_mteb(ranks):
    data = odd_set()
    metrics = on_any_ranks(ranks, LoadedSet(data, metrics=METRICS))["odd"]
    for metric, value in theirs_of(ranks, data).items():
        assert metrics[metric] == pytest.approx(value, abs=6e-6), metric  # MTEB rounds to five digits
    assert 0 < metrics["ndcg@3"] < metrics["ndcg@100"] < 1


def test_a_query_is_not_its_own_document(ranks):
    """As in ArguAna: ids of queries are ids of documents, and each would find itself first."""
    data = odd_set()
    ids = data.documents.ids
    queries = {ids[i]: data.documents.texts[i] for i in (0, 2, 5, 9, 21)}
    judgements = {query: {ids[(int(query[1:]) + 7) % 23]: 1, query: 1} for query in queries}
    data = replace(data, queries=queries, judgements=judgements, ignore_identical_ids=True)
    metrics = on_any_ranks(ranks, LoadedSet(data, metrics=METRICS))["odd"]
    for metric, value in theirs_of(ranks, data).items():
        assert metrics[metric] == pytest.approx(value, abs=6e-6), metric
    assert metrics["recall@100"] == 0.5
    included = on_any_ranks(ranks, LoadedSet(replace(data, ignore_identical_ids=False), metrics=METRICS))["odd"]
    assert included["mrr@1"] > metrics["mrr@1"]


def holes(world, data, folder):
    encoder = sentence_encoder(world)
    return Evaluator([LoadedSet(data, metrics=METRICS)], encoder, world).evaluate(save_runs=folder)["odd"]


def test_hole_is_the_fraction_of_documents_without_judgements(ranks, tmp_path):
    data = odd_set()
    metrics = ranks(2, holes, data, tmp_path)[0]
    run: dict[str, dict[str, float]] = {}
    for line in run_path(tmp_path, "odd").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        run.setdefault(query, {})[document] = float(score)
    theirs = hole(data.judgements, run, CUTS)
    for k in CUTS:
        values = theirs[f"Hole_at_{k}"]
        assert metrics[f"hole@{k}"] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert 0 < metrics["hole@3"] < 1


def test_metrics_of_whole_rankings_do_not_depend_on_the_depth_of_run_files(ranks, tmp_path):
    texts = [text(i, 3) for i in range(40)]
    data = RetrievalSet(
        "deep", {"q": text(3, 2)}, Corpus([f"d{i}" for i in range(40)], texts), {"q": {"d1": 1, "d30": 1, "d9": 1}}
    )
    results = [ranks(2, whole, data, folder, depth)[0] for folder, depth in [(tmp_path, 2), (tmp_path, 30), (None, 2)]]
    assert results[0] == results[1] == results[2]
    assert len((tmp_path / "deep.run").read_text().splitlines()) == 30
    assert results[0]["map@3"] < results[0]["map"]


def whole(world, data, folder, depth):
    loaded = LoadedSet(data, metrics=("map", "ndcg", "mrr", "map@3"))
    return Evaluator([loaded], sentence_encoder(world), world).evaluate(save_runs=folder, run_depth=depth)["deep"]


def test_more_queries_than_are_measured_at_a_time(ranks):
    data = odd_set()
    queries = {f"q{i}": text(i % 90, 3) for i in range(1100)}
    judgements = {query: {f"d{i % 23:02}": 1} for i, query in enumerate(queries)}
    metrics = on_any_ranks(ranks, LoadedSet(RetrievalSet("odd", queries, data.documents, judgements)))
    assert 0 < metrics["odd"]["ndcg@10"] < 1


def test_no_query_is_judged(ranks):
    data = replace(odd_set(), judgements={})
    assert set(on_any_ranks(ranks, LoadedSet(data))["odd"].values()) == {0.0}
