"""Metrics against trec_eval itself, and against definitions worked out by hand."""

import math

import pytest
import pytrec_eval

from embedtrain.errors import ConfigError
from embedtrain.evaluation.first_stage import read_run
from embedtrain.evaluation.metrics import RETRIEVAL_METRICS, parse_best_metric, retrieval_metrics, sts_metrics
from embedtrain.evaluation.tasks import run_path, write_run


def test_a_judged_query_without_a_run_counts_as_zero():
    judgements = {"q1": {"a": 1}, "q2": {"b": 2}, "q3": {"c": 0}}
    metrics = retrieval_metrics(judgements, {"q1": {"a": 0.5, "b": 0.4}, "q3": {}, "not judged": {"a": 1.0}})
    assert metrics == dict.fromkeys(RETRIEVAL_METRICS, 1 / 3)


def test_a_query_without_a_relevant_document_scores_zero_after_other_queries():
    metrics = ("ndcg", "map", "mrr", "ndcg@5", "map@5", "mrr@5", "recall@5", "precision@5", "hit@5", "hole@2")
    # trec_eval keeps the memory of this call, in which it counts the judgements of each gain.
    assert retrieval_metrics({"q": {"a": 3, "b": 1}}, {"q": {"a": 1.0, "b": 2.0}}, metrics)["ndcg"] < 1
    judgements = {"below zero": {"a": -1, "b": -2}, "zero": {"a": 0}, "relevant": {"a": 1, "b": -1}}
    run = {query: {"a": 2.0, "b": 1.0} for query in judgements}
    expected = dict.fromkeys(metrics, 1 / 3) | {"precision@5": 0.2 / 3, "hole@2": 0.0}
    assert retrieval_metrics(judgements, run, metrics) == pytest.approx(expected)
    only_negative = {"below zero": judgements["below zero"]}
    assert retrieval_metrics(only_negative, run, metrics) == dict.fromkeys(metrics, 0.0)


def test_definitions():
    run = {"q": {f"d{i:02}": 1 - i / 100 for i in range(30)}}
    judgements = {"q": {"d01": 2, "d12": 1, "nowhere": 1, "d00": 0}}
    ideal = 2 + 1 / math.log2(3) + 1 / math.log2(4)
    assert retrieval_metrics(judgements, run) == pytest.approx(
        {
            "ndcg@3": 2 / math.log2(3) / ideal,
            "ndcg@10": 2 / math.log2(3) / ideal,
            "mrr@10": 1 / 2,
            "map@100": (1 / 2 + 2 / 13) / 3,
            "recall@10": 1 / 3,
            "recall@100": 2 / 3,
        },
        abs=1e-12,
    )


@pytest.mark.parametrize(("rank", "expected"), [(1, 1.0), (9, 1 / 9), (10, 0.1), (11, 0.0), (12, 0.0)])
def test_mrr_is_cut_at_ten(rank, expected):
    run = {"q": {f"d{i}": 100.0 - i for i in range(1, 30)}}
    assert retrieval_metrics({"q": {f"d{rank}": 1}}, run)["mrr@10"] == expected


def test_ties_are_broken_by_id_downwards():
    assert retrieval_metrics({"q": {"b": 1}}, {"q": {"a": 0.5, "b": 0.5}})["mrr@10"] == 1
    assert retrieval_metrics({"q": {"a": 1}}, {"q": {"a": 0.5, "b": 0.5}})["mrr@10"] == 0.5


def test_a_run_file_has_six_columns_and_the_same_metrics(tmp_path):
    judgements = {"q 1": {"d 1": 1, "d3": 1}, "q2": {"d0": 1}}
    run = {"q 1": {"d 1": 0.12345678806304932, "d2": 0.12345678061246872, "d3": -1e-20}, "q2": {}}
    path = run_path(tmp_path / "new folder", "owner/set one")
    assert path.name == "owner%2Fset%20one.run"
    write_run(path, run.items(), depth=3)
    lines = [line.split(" ") for line in path.read_text().splitlines()]
    assert lines[0] == ["q%201", "Q0", "d%201", "1", "0.123456788", "embedtrain"]
    assert [(fields[2], fields[3]) for fields in lines] == [("d%201", "1"), ("d2", "2"), ("d3", "3")]
    assert not list(path.parent.glob("*.part"))
    with path.open() as file:
        read = pytrec_eval.parse_run(file)
    quoted = {
        q.replace(" ", "%20"): {d.replace(" ", "%20"): g for d, g in judged.items()} for q, judged in judgements.items()
    }
    assert retrieval_metrics(quoted, read) == retrieval_metrics(judgements, run)
    write_run(path, run.items(), depth=1)
    assert len(path.read_text().splitlines()) == 1


def test_ids_in_a_run_file_are_distinct_and_can_be_decoded(tmp_path):
    ids = ["a b", "a%20b", "a%2520b", "a  b", "a\u2028b", "a\x1cb", "\ufeffa", "a\rb", "%", "é%E9", "a\x1b[31mb"]
    run = {query: {document: 1.0 - rank / 100 for rank, document in enumerate(ids)} for query in ids}
    path = run_path(tmp_path, "set")
    write_run(path, run.items(), depth=len(ids))
    assert {query: list(documents) for query, documents in read_run(path).items()} == dict.fromkeys(ids, ids)
    with path.open() as file:
        assert len(pytrec_eval.parse_run(file)) == len(ids)
    # Other programs do not encode ids.
    path.write_text("a%20b Q0 a%20b 1 1.0 other\n")
    assert list(read_run(path)["a%20b"]) == ["a%20b"]


def test_sts():
    assert sts_metrics([0.1, 0.2, 0.4], [1, 2, 3]) == pytest.approx({"spearman": 1.0, "pearson": 0.9819805}, abs=1e-6)
    assert sts_metrics([0.1, 0.1, 0.4], [1, 2, 3])["spearman"] == pytest.approx(math.sqrt(3) / 2)


def test_equal_similarities_have_no_correlation():
    assert sts_metrics([0.3, 0.3, 0.3], [1, 2, 3]) == {"spearman": 0.0, "pearson": 0.0}


METRICS = {"dev": ("ndcg@10", "mrr@10"), "a/b": ("spearman",)}


def test_best_metric_is_a_set_and_a_metric():
    assert parse_best_metric("dev/mrr@10", METRICS) == ("dev", "mrr@10")
    assert parse_best_metric("a/b/spearman", METRICS) == ("a/b", "spearman")


@pytest.mark.parametrize(
    ("best", "metrics", "words"),
    [
        ("dev/ndcg10", METRICS, r"checkpoint\.best_metric=dev/ndcg10: .*ndcg@10, mrr@10"),
        ("test/ndcg@10", METRICS, r"checkpoint\.best_metric=test/ndcg@10 .*dev/ndcg@10, a/b/spearman"),
        ("ndcg@10", METRICS, r"checkpoint\.best_metric=ndcg@10 .*set/metric"),
        ("dev/ndcg@10", {}, r"checkpoint\.best_metric=dev/ndcg@10 .*evaluation\.sets is empty"),
    ],
)
def test_unknown_best_metrics_are_rejected(best, metrics, words):
    with pytest.raises(ConfigError, match=words):
        parse_best_metric(best, metrics)
