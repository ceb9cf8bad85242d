"""What every kind has in common: odd models and sets, random states, metrics that are requested, progress."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from embedtrain.config.evaluation import Classifier, EvaluationSet, SetKind
from embedtrain.errors import ConfigError, EmbedtrainError, EvaluationInterrupted
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.metrics import parse_best_metric
from embedtrain.evaluation.sets import load_sets
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    Corpus,
    LabelledPairs,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
    check_metrics,
    dataset_info,
    metric_names,
)
from embedtrain.tracking.metrics import DatasetInfo
from tests.evaluation.tasks.mteb_reference import on_any_ranks
from tests.evaluation.tiny import sentence_encoder
from tests.small import text, write_beir


def one_of_each(num_texts=6):
    """A small set of each kind."""
    texts = [text(i, 3 + i % 3) for i in range(num_texts)]
    labels = [i % 2 for i in range(num_texts)]
    documents = Corpus([f"d{i}" for i in range(num_texts)], texts)
    queries = {f"q{i}": text(i + 30, 3) for i in range(num_texts)}
    judgements = {query: {f"d{i}": 1} for i, query in enumerate(queries)}
    candidates = {query: list(range(num_texts)) for query in queries}
    clusters = [[label] for label in labels]
    return [
        RetrievalSet("retrieval", queries, documents, judgements),
        RetrievalSet("reranking", queries, documents, judgements, candidates),
        ScoredPairs("sts", texts, texts[::-1], [float(i) for i in range(num_texts)]),
        LabelledPairs("pair_classification", texts, texts[::-1], labels),
        Bitext("bitext", texts, texts[::-1]),
        ClassificationSet("logistic", texts, labels, texts, labels, experiments=2),
        ClassificationSet("knn", texts, labels, texts, labels, Classifier.knn, None),
        ClusteringSet("drawn", texts, clusters, experiments=1),
        ClusteringSet("grouped", texts, clusters, [list(range(num_texts))]),
    ]


def constant(world, sets, value):
    """Metrics, or the error, of a model that gives every text the same vector."""
    encoder = sentence_encoder(world)
    encoder.encoder.register_forward_hook(
        lambda _module, _inputs, parts: tuple(torch.full_like(part, value) for part in parts)
    )
    try:
        return Evaluator(sets, encoder, world).evaluate()
    except EmbedtrainError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("value", [0.5, 0.0])
def test_a_constant_model_has_finite_metrics(ranks, value):
    results = ranks(2, constant, [LoadedSet(data) for data in one_of_each()], value)
    assert results[0] == results[1]
    assert all(np.isfinite(value) for of_set in results[0].values() for value in of_set.values())
    assert results[0]["sts"] == {"spearman": 0.0, "pearson": 0.0}
    assert results[0]["logistic"]["accuracy"] == results[0]["pair_classification"]["ap"] == 0.5
    assert results[0]["drawn"]["v_measure"] == results[0]["grouped"]["v_measure"] == 0.0


@pytest.mark.parametrize("data", one_of_each(), ids=lambda data: data.name)
def test_vectors_that_are_not_finite_stop_all_ranks(ranks, data):
    answers = ranks(2, constant, [LoadedSet(data)], float("nan"))
    assert answers[0] == answers[1]
    assert answers[0].startswith("TrainingError: ")
    assert "not finite" in answers[0]


def test_fewer_texts_than_ranks(ranks):
    metrics = on_any_ranks(ranks, *map(LoadedSet, one_of_each(2)))
    assert all(np.isfinite(value) for of_set in metrics.values() for value in of_set.values())
    assert metrics["logistic"]["accuracy"] == 1.0


def test_one_text(ranks):
    sets = [data for data in one_of_each(1) if not isinstance(data, ClassificationSet | ScoredPairs)]
    metrics = on_any_ranks(ranks, *map(LoadedSet, sets))
    assert metrics["drawn"] == metrics["grouped"] == {"v_measure": 1.0, "v_measure_std": 0.0, "ami": 1.0}
    assert metrics["bitext"]["f1"] == metrics["retrieval"]["mrr@10"] == metrics["reranking"]["map"] == 1.0


def states(world):
    """Global random states and numbers of threads, before and after an evaluation of all kinds."""

    def now():
        return (
            random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist(),
            torch.get_num_threads(),
        )  # fmt: skip

    encoder = sentence_encoder(world)
    torch.set_num_threads(2)
    try:
        random.seed(5 + world.rank)
        np.random.seed(6 + world.rank)
        torch.manual_seed(7 + world.rank)
        before = now()
        Evaluator([LoadedSet(data) for data in one_of_each()], encoder, world).evaluate()
        return before == now()
    finally:
        torch.set_num_threads(1)


def test_an_evaluation_draws_no_global_random_number(ranks):
    assert ranks(2, states) == [True] * 2


def test_metrics_of_other_kinds_of_sets_are_rejected():
    sets = {data.name: data for data in one_of_each()}
    for data in sets.values():
        check_metrics(data, metric_names([LoadedSet(data)])[data.name], "metrics")
    for name, metric, message in [
        ("sts", "ndcg@10", "sets[0].metrics: 'ndcg@10' is not a metric of semantic textual similarity"),
        ("bitext", "ap", "'ap' is not a metric of bitext mining: allowed are f1, precision, recall, accuracy, "),
        ("pair_classification", "v_measure", "not a metric of pair classification: allowed are ap, accuracy, f1"),
        ("drawn", "nmi", "'nmi' is not a metric of clustering: allowed are v_measure, v_measure_std, ami"),
        ("knn", "auc", "'auc' is not a metric of classification: allowed are accuracy, f1, f1_weighted, "),
        ("retrieval", "ndcg@0", "sets[0].metrics: 'ndcg@0' is not a metric of rankings: allowed are ndcg@K"),
        ("reranking", "accuracy", "'accuracy' is not a metric of rankings"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            check_metrics(sets[name], [metric], "sets[0].metrics")
        assert message in str(caught.value)
    three = replace(sets["knn"], labels=[0, 1, 2, 0, 1, 2])
    check_metrics(sets["knn"], ["ap"], "metrics")
    with pytest.raises(ConfigError, match=r"'ap' .* classification"):
        check_metrics(three, ["ap"], "metrics")
    with pytest.raises(ConfigError, match=r"metrics=\[\]"):
        check_metrics(three, [], "metrics")


def progress(world, sets):
    encoder = sentence_encoder(world)
    before = encoder.progress
    reports = []
    Evaluator(sets, encoder, world).evaluate(
        progress=lambda activity, done, total: reports.append((activity, done, total))
    )
    assert encoder.progress is before
    Evaluator(sets, encoder, world).evaluate()
    return reports


def test_progress_names_the_set_and_what_is_encoded(ranks):
    reports = ranks(2, progress, [LoadedSet(data) for data in one_of_each()])[0]
    activities = list(dict.fromkeys(activity for activity, _, _ in reports))
    assert activities[:5] == [
        "retrieval: encoding queries", "retrieval: encoding documents",
        "reranking: encoding queries", "reranking: encoding documents", "sts: encoding texts",
    ]  # fmt: skip
    assert {activity: (done, total) for activity, done, total in reports}["retrieval: encoding documents"][0] > 0
    assert all(0 < done <= total for _, done, total in reports)


def test_means_over_sets_with_the_same_metrics(ranks):
    retrieval, reranking, sts, *_ = one_of_each()
    metrics = on_any_ranks(ranks, LoadedSet(retrieval), LoadedSet(reranking))
    assert list(metrics) == ["retrieval", "reranking", "mean"]
    assert list(metrics["mean"]) == ["ndcg@10", "mrr@10"]
    names = metric_names([LoadedSet(retrieval), LoadedSet(reranking)])
    assert parse_best_metric("mean/ndcg@10", names) == ("mean", "ndcg@10")
    for metric, value in metrics["mean"].items():
        assert value == pytest.approx((metrics["retrieval"][metric] + metrics["reranking"][metric]) / 2, abs=1e-12)
    assert list(on_any_ranks(ranks, LoadedSet(retrieval), LoadedSet(sts))) == ["retrieval", "sts"]
    assert list(metric_names([LoadedSet(retrieval), LoadedSet(replace(retrieval, name="mean"))])) == [
        "retrieval",
        "mean",
    ]
    assert list(metric_names([LoadedSet(retrieval)])) == ["retrieval"]
    three = [LoadedSet(retrieval), LoadedSet(sts), LoadedSet(reranking)]
    assert metric_names(three)["mean"] == ("ndcg@10", "mrr@10"), "over the two that have them"
    assert on_any_ranks(ranks, *three)["mean"] == metrics["mean"]
    with pytest.raises(ConfigError, match=r"checkpoint\.best_metric=mean/ndcg@10: .*retrieval, sts"):
        parse_best_metric("mean/ndcg@10", metric_names([LoadedSet(retrieval), LoadedSet(sts)]))


def results_before_an_interruption(world, sets):
    results = {}
    with pytest.raises(EvaluationInterrupted):
        Evaluator(sets, sentence_encoder(world), world).evaluate(
            on_result=lambda name, _metrics, dataset: results.update({name: dataset}), stop=lambda: len(results) == 2
        )
    return results


def test_results_of_completed_sets_are_reported_before_the_others_are_measured(ranks):
    sets = [LoadedSet(data) for data in one_of_each()[:3]]
    for results in ranks(2, results_before_an_interruption, sets):
        assert list(results) == ["retrieval", "reranking"]
        assert results["retrieval"] == DatasetInfo("retrieval", {"queries": 6, "documents": 6}, subset=False)


def test_every_kind_of_set_says_what_it_measures():
    sets = [LoadedSet(data, is_subset=data.name == "sts") for data in one_of_each()]
    rows = {loaded.data.name: dataset_info(loaded).as_row() for loaded in sets}
    assert rows["reranking"] == {"kind": "reranking", "queries": 6, "documents": 6, "subset": False}
    assert rows["sts"] == {"kind": "sts", "pairs": 6, "subset": True}
    assert rows["pair_classification"]["pairs"] == rows["bitext"]["pairs"] == 6
    assert rows["knn"] == {"kind": "classification", "texts": 6, "train_texts": 6, "subset": False}
    assert rows["drawn"] == {"kind": "clustering", "texts": 6, "subset": False}
    assert {row["kind"] for row in rows.values()} == {kind.value for kind in SetKind} - {"auto"}
    assert DatasetInfo.of_mean([dataset_info(loaded) for loaded in sets]).as_row() == {
        "kind": "mean", "sets": 9, "subset": True,
    }  # fmt: skip


def failing_callback(world, sets):
    def full(name, _metrics, _dataset):
        if world.rank == 1:
            raise OSError(28, "No space left on device", name)

    with pytest.raises(EmbedtrainError, match="No space left on device"):
        Evaluator(sets, sentence_encoder(world), world).evaluate(on_result=full)


def test_results_that_cannot_be_written_end_all_ranks(ranks):
    ranks(2, failing_callback, [LoadedSet(one_of_each()[2])])


def metrics_of_sets(world, folder, metrics, own):
    beir = EvaluationSet(path=str(folder / "dev"), metrics=own)
    configs = [beir, EvaluationSet(path=str(folder / "sts.tsv"))]
    return [loaded.metrics for loaded in load_sets(configs, world, metrics=metrics)]


def test_metrics_for_all_sets(ranks, tmp_path):
    """A set's own metrics come first; of those for all sets, each takes what its kind has."""
    write_beir(tmp_path / "dev", 6)
    (tmp_path / "sts.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\nc\td\t0\n")
    (answer,) = ranks(1, metrics_of_sets, tmp_path, ["recall@1000", "ndcg", "pearson"], None)
    assert answer == [("recall@1000", "ndcg"), ("pearson",)]
    (answer,) = ranks(1, metrics_of_sets, tmp_path, ["recall@1000", "ndcg"], ["mrr"])
    assert answer == [("mrr",), None]
    names_all = (
        r"ConfigError: evaluation\.metrics: 'ndgc@10' is not .*: allowed are ndcg@K, .*; .*: allowed are spearman,"
    )
    with pytest.raises(AssertionError, match=names_all):
        ranks(1, metrics_of_sets, tmp_path, ["pearson", "ndgc@10"], None)


def truncated(world, sets):
    """Metrics at all, 12 and 4 dimensions; those of encoders of 12 and 4; forward passes with and without them."""
    encoder = sentence_encoder(world)
    evaluator = Evaluator(sets, encoder, world, truncate_dims=[12, 4])
    assert {name: tuple(metrics) for name, metrics in evaluator.evaluate().items()} == metric_names(sets, [12, 4])
    combined, passes = evaluator.evaluate(), encoder.encoder.forwards
    expected = Evaluator(sets, encoder, world).evaluate()
    passes = passes, encoder.encoder.forwards - passes
    for dimension in (12, 4):
        encoder.truncate_dim = dimension
        alone = Evaluator(sets, encoder, world).evaluate()
        expected |= {f"{name}@{dimension}": metrics for name, metrics in alone.items()}
    return combined, expected, passes, {name: info.as_row() for name, info in evaluator.datasets.items()}


@pytest.mark.slow
def test_truncated_vectors_are_measured_without_encoding_again(ranks):
    """Every kind of set: the metrics of an encoder that returns fewer dimensions."""
    sets = [LoadedSet(data) for data in one_of_each()]
    answers = [ranks(size, truncated, sets)[0] for size in (1, 2)]
    combined, expected, passes, datasets = answers[0]
    assert combined.keys() == expected.keys()
    for name, metrics in expected.items():
        assert combined[name] == pytest.approx(metrics, abs=1e-6), name
    assert combined["sts"] != combined["sts@4"]
    assert combined == answers[1][0], "on any number of ranks"
    assert passes[0] == 2 * passes[1], "two evaluations"
    assert datasets["retrieval@4"] == {**datasets["retrieval"], "dimension": 4}
    assert datasets["mean@4"]["dimension"] == 4
