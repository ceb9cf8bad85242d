"""The whole evaluation on real ranks: the same metrics to the bit, and trec_eval's own."""

from pathlib import Path

import pytest
import pytrec_eval
import torch

from embedtrain.errors import EmbedtrainError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.metrics import RETRIEVAL_METRICS, retrieval_metrics
from embedtrain.evaluation.types import Corpus, LoadedSet, RetrievalSet, ScoredPairs, metric_names
from tests.evaluation.tiny import sentence_encoder
from tests.small import text


def small_set(num_queries=7, num_documents=11):
    documents = {f"d{i}": text(i, 2 + i % 7) for i in range(num_documents)}
    documents |= {"d5": documents["d2"], "d10": documents["d2"], "d1": "", "d7": ""} if num_documents > 10 else {}
    queries = {f"q{i}": text(50 + i, 3) for i in range(num_queries)}
    judgements = {
        f"q{i}": {f"d{(i * 3) % num_documents}": 1, f"d{(i + 4) % num_documents}": 2} for i in range(num_queries)
    }
    judgements["q0"] = {"nowhere": 1}
    del judgements["q1"]
    return RetrievalSet("small", queries, Corpus.from_dict(documents), judgements)


def pairs():
    first, second = [text(i, 4) for i in range(9)], [text(i + i % 3, 5) for i in range(9)]
    return ScoredPairs("pairs", first, second, [float(i % 4) for i in range(9)])


def evaluate(world, sets, save_runs=None, depth=100, **prompts):
    encoder = sentence_encoder(world, **prompts)
    encoder.encoder.train()  # dropout must not show
    evaluator = Evaluator(sets, encoder, world)
    assert {name: tuple(metrics) for name, metrics in evaluator.evaluate().items()} == metric_names(sets)
    return evaluator.evaluate(save_runs=save_runs, run_depth=depth)


def test_the_same_metrics_on_any_number_of_ranks_and_those_of_trec_eval(ranks, tmp_path):
    data = small_set()
    sets = [LoadedSet(data), LoadedSet(pairs())]
    results, runs = [], []
    for size in (1, 2, 3):
        results += ranks(size, evaluate, sets, tmp_path / str(size))
        runs.append((tmp_path / str(size) / "small.run").read_text())
    assert all(result == results[0] for result in results)
    assert runs[0] == runs[1] == runs[2]
    assert set(results[0]) == {"small", "pairs"}

    with (tmp_path / "1" / "small.run").open() as file:
        run = pytrec_eval.parse_run(file)
    assert set(run) == {"q0", "q2", "q3", "q4", "q5", "q6"}
    assert {len(actual) for actual in run.values()} == {11}
    metrics = results[0]["small"]
    assert metrics == pytest.approx(retrieval_metrics(data.judgements, run), abs=1e-6)
    each = pytrec_eval.RelevanceEvaluator(data.judgements, {"ndcg_cut.10", "map_cut.100", "recall.10"}).evaluate(run)
    for name, trec_name in [("ndcg@10", "ndcg_cut_10"), ("map@100", "map_cut_100"), ("recall@10", "recall_10")]:
        assert metrics[name] == pytest.approx(sum(q[trec_name] for q in each.values()) / 6, abs=1e-6)
    # Equal texts have equal scores in the file as well, in trec_eval's order.
    for actual in run.values():
        assert actual["d5"] == actual["d10"] == actual["d2"]
        assert list(actual).index("d5") < list(actual).index("d2") < list(actual).index("d10")
    assert -1 < results[0]["pairs"]["spearman"] < 1


def test_fewer_documents_than_ranks(ranks):
    data = RetrievalSet("two", {"q": "alpha"}, Corpus.from_dict({"d0": "alpha", "d1": "beta gamma"}), {"q": {"d0": 1}})
    assert ranks(3, evaluate, [LoadedSet(data)]) == [{"two": dict.fromkeys(RETRIEVAL_METRICS, 1.0)}] * 3


def test_depth_is_that_of_run_files_alone(ranks, tmp_path):
    sets = [LoadedSet(small_set())]
    deep, shallow = ranks(2, evaluate, sets), ranks(2, evaluate, sets, tmp_path, 2)
    assert deep == shallow
    assert len((tmp_path / "small.run").read_text().splitlines()) == 6 * 2


def run_of(ranks, folder: Path, loaded: LoadedSet, **prompts):
    ranks(1, evaluate_with, [loaded], folder, prompts)
    return (folder / "small.run").read_text()


def evaluate_with(world, sets, folder, prompts):
    return evaluate(world, sets, folder, **prompts)


def test_a_sets_own_prompts_come_before_the_models(ranks, tmp_path):
    data = small_set()
    plain = run_of(ranks, tmp_path, LoadedSet(data))
    prompted = run_of(ranks, tmp_path, LoadedSet(data, "alpha beta ", "nu "))
    assert prompted != plain
    assert run_of(ranks, tmp_path, LoadedSet(data), query_prompt="alpha beta ", document_prompt="nu ") == prompted
    assert run_of(ranks, tmp_path, LoadedSet(data, "", ""), query_prompt="mu ", document_prompt="mu ") == plain
    by_hand = RetrievalSet(
        data.name,
        {query: "alpha beta " + words for query, words in data.queries.items()},
        Corpus(data.documents.ids, ["nu " + words for words in data.documents.texts]),
        data.judgements,
    )
    assert run_of(ranks, tmp_path, LoadedSet(by_hand)) == prompted


def pairs_with(world, prompt):
    data = pairs()
    given = evaluate(world, [LoadedSet(data, prompt)])
    by_hand = ScoredPairs("pairs", [prompt + t for t in data.first], [prompt + t for t in data.second], data.scores)
    return given == evaluate(world, [LoadedSet(by_hand)]) != evaluate(world, [LoadedSet(data)])


def test_both_sentences_of_a_pair_get_the_query_prompt(ranks):
    assert ranks(1, pairs_with, "kappa kappa ") == [True]


def fail_to_write(world, sets, folder):
    try:
        return evaluate(world, sets, folder)
    except EmbedtrainError as error:
        return type(error).__name__


def test_a_run_file_that_cannot_be_written_stops_all_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    answers = ranks(2, fail_to_write, [LoadedSet(small_set())], tmp_path / "file" / "runs")
    assert answers == ["EmbedtrainError", "FailedElsewhere"]


def scaled(world, factor):
    """The metrics of a model whose vectors have another length each."""
    encoder = sentence_encoder(world)
    generator = torch.Generator().manual_seed(1)
    inner = encoder.encoder

    def stretch(_module, _inputs, parts):
        (vectors,) = parts
        return (vectors * (1 + factor * torch.rand(vectors.shape[0], 1, generator=generator)),)

    inner.register_forward_hook(stretch)
    return Evaluator([LoadedSet(small_set())], encoder, world).evaluate()


def test_similarity_is_the_cosine(ranks):
    assert ranks(1, scaled, 5.0) == ranks(1, scaled, 0.0)
