"""Reranking against MTEB, and where nothing ties sentence-transformers, on the same vectors."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from mteb.abstasks import AbsTaskRetrieval
from sentence_transformers.sentence_transformer.evaluation import RerankingEvaluator

from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.types import Corpus, LoadedSet, RetrievalSet
from tests.evaluation.tasks.mteb_reference import encoded, on_any_ranks, retrieval_data, scores_of_task, task_of, unit
from tests.evaluation.tasks.test_retrieval import odd_set
from tests.evaluation.tiny import sentence_encoder
from tests.small import text

METRICS = ("map", "mrr@10", "ndcg@10", "recall@3", "precision@1", "hole@3")


def candidate_set():
    """Ties, a query with one candidate and one with none, candidates that nobody judged, judged ones that are none."""
    data = odd_set()
    candidates = {query: [(int(query[1:]) * 5 + j * 3) % 23 for j in range(1 + number)]
                  for number, query in enumerate(data.judged_queries)}  # fmt: skip
    candidates |= {"q2": [], "q10": [2, 5, 20, 11, 9], "q9": [6, 18, 13, 4, 22]}
    return replace(data, candidates=candidates)


def test_metrics_equal_mteb(ranks):
    data = candidate_set()
    metrics = on_any_ranks(ranks, LoadedSet(data, metrics=METRICS))["odd"]
    vectors = ranks(1, encoded, [*data.queries.values(), *data.documents.texts])[0]
    scores = scores_of_task(task_of(AbsTaskRetrieval, "Reranking", "map_at_1000", retrieval_data(data)), vectors)
    for metric, theirs in [
        ("map", "map_at_1000"), ("mrr@10", "mrr_at_10"), ("ndcg@10", "ndcg_at_10"), ("recall@3", "recall_at_3"),
        ("precision@1", "precision_at_1"),
    ]:  # fmt: skip
        assert metrics[metric] == pytest.approx(scores[theirs], abs=6e-6), metric  # MTEB rounds to five digits
    assert 0 < metrics["map"] < 1


def plain_set():
    """Different texts: nothing ties, so that the order of equal scores does not matter."""
    texts = [text(i, 3 + i % 4) + f" {i % 10} {i // 10}" for i in range(30)]
    queries = {f"q{i}": text(i, 4) for i in range(6)}
    candidates = {f"q{i}": [(i * 4 + j * 7) % 30 for j in range(4 + 3 * i)] for i in range(6)}
    judgements = {
        query: {f"d{n}": int(at % 3 == 1) for at, n in enumerate(dict.fromkeys(numbers))}
        for query, numbers in candidates.items()
    }
    return RetrievalSet("plain", queries, Corpus([f"d{i}" for i in range(30)], texts), judgements, candidates)


class TheirModel:
    similarity_fn_name = "cosine"

    def __init__(self, vectors):
        self.vectors = vectors

    def encode_query(self, texts, **_options):
        return torch.stack(list(unit([self.vectors[text] for text in texts])))

    encode_document = encode_query

    @property
    def model_card_data(self):
        return self

    def set_evaluation_metrics(self, *_args, **_kwargs):
        pass


def test_metrics_equal_sentence_transformers(ranks):
    data = plain_set()
    metrics = on_any_ranks(ranks, LoadedSet(data))["plain"]
    vectors = ranks(1, encoded, [*data.queries.values(), *data.documents.texts])[0]
    samples = []
    for query, words in data.queries.items():
        gains = data.judgements[query]
        text_of = dict(zip(data.documents.ids, data.documents.texts, strict=True))
        positive = [text_of[document] for document, gain in gains.items() if gain]
        samples.append(
            {"query": words, "positive": positive, "negative": [text_of[d] for d, gain in gains.items() if not gain]}
        )
    theirs = RerankingEvaluator(samples, at_k=10)(TheirModel(vectors))
    assert tuple(metrics) == ("map", "mrr@10", "ndcg@10")
    assert metrics == pytest.approx({name: theirs[name] for name in metrics}, abs=1e-6)
    # A candidate that is named twice counts once.
    twice = {query: [*numbers, numbers[0], numbers[-1]] for query, numbers in data.candidates.items()}
    assert on_any_ranks(ranks, LoadedSet(replace(data, candidates=twice)))["plain"] == metrics


def test_a_query_is_not_its_own_candidate(ranks):
    data = plain_set()
    queries = {"d3": data.documents.texts[3]}
    data = replace(data, queries=queries, judgements={"d3": {"d3": 1, "d4": 1}}, candidates={"d3": [3, 4]})
    included = on_any_ranks(ranks, LoadedSet(data))["plain"]
    ignored = on_any_ranks(ranks, LoadedSet(replace(data, ignore_identical_ids=True)))["plain"]
    assert (included["map"], ignored["map"]) == (1.0, 0.5)


class Only(Sequence):
    """Texts of which several must not be read."""

    def __init__(self, texts, allowed):
        self.texts, self.allowed = texts, allowed

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, number):
        assert number in self.allowed, f"document {number} is no candidate"
        return self.texts[number]


def run_file(world, data, folder):
    return Evaluator([LoadedSet(data)], sentence_encoder(world), world).evaluate(save_runs=folder)


def test_only_candidates_are_encoded_and_the_run_file_has_them_best_first(ranks, tmp_path):
    data = plain_set()
    documents = Corpus(data.documents.ids, Only(data.documents.texts, {1, 8, 4}))
    ranks(2, run_file, replace(data, documents=documents, candidates={q: [1, 8, 4] for q in data.queries}), tmp_path)
    lines = [line.split() for line in (tmp_path / "plain.run").read_text().splitlines()]
    assert [fields[0] for fields in lines] == [query for query in data.queries for _ in range(3)]
    assert [fields[3] for fields in lines] == ["1", "2", "3"] * 6
    scores = [float(fields[4]) for fields in lines]
    assert all(scores[i] >= scores[i + 1] >= scores[i + 2] for i in range(0, len(scores), 3))
    assert {fields[2] for fields in lines} == {"d1", "d8", "d4"}
