"""Bitext mining against MTEB and sentence-transformers, on the same vectors, and the metrics of a real model."""

import csv

import pytest
import sentence_transformers
from mteb.abstasks.text.bitext_mining import AbsTaskBitextMining
from packaging.version import Version
from sentence_transformers.sentence_transformer.evaluation import TranslationEvaluator
from transformers import AutoTokenizer

from embedtrain.data.tokens import TextTokenizer
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.types import Bitext, LoadedSet
from embedtrain.inference.encode import SentenceEncoder
from tests.evaluation.tasks.mteb_reference import encoded, on_any_ranks, scores_of_task, splits, task_of, unit
from tests.evaluation.test_real import MeanPooled
from tests.small import text


def bitext(number=17):
    """Rows whose second sentence is nearly the first; sentences stand twice, here or there or on both sides."""
    first = [text(i, 4 + i % 3) for i in range(number)]
    second = [text(i + (i % 5 == 0), 5 + i % 2) for i in range(number)]
    first[6], second[9], second[12] = first[2], second[3], second[3]
    first[14], second[14] = first[8], second[8]
    return Bitext("bitext", first, second)


class TheirModel:
    def __init__(self, vectors):
        self.vectors = vectors

    def encode(self, texts, **_options):
        return list(unit([self.vectors[text] for text in texts]))


def test_metrics_equal_other_libraries(ranks):
    data = bitext()
    metrics = on_any_ranks(ranks, LoadedSet(data))["bitext"]
    vectors = ranks(1, encoded, [*data.first, *data.second])[0]
    task = task_of(
        AbsTaskBitextMining, "BitextMining", "f1", splits(test={"sentence1": data.first, "sentence2": data.second})
    )
    mteb = scores_of_task(task, vectors)
    for name in ("f1", "precision", "recall", "accuracy"):
        assert metrics[name] == pytest.approx(mteb[name], abs=1e-6), name

    if Version(sentence_transformers.__version__) < Version("6.2"):
        return  # there, of equal sentences only the one of the same row is right

    class Evaluated(TranslationEvaluator):
        def store_metrics_in_model_card_data(self, *_args, **_kwargs):
            pass

    theirs = Evaluated(list(data.first), list(data.second))(TheirModel(vectors))
    assert metrics["accuracy_back"] == pytest.approx(theirs["trg2src_accuracy"], abs=1e-6)
    assert metrics["accuracy_mean"] == pytest.approx(theirs["mean_accuracy"], abs=1e-6)
    assert 0.2 < metrics["f1"] < metrics["accuracy"] < 1


def test_the_earlier_of_equally_near_sentences_counts(ranks):
    same = Bitext("same", ["alpha"] * 5, ["beta"] * 5)
    metrics = on_any_ranks(ranks, LoadedSet(same))["same"]
    assert metrics["accuracy"] == 0.2
    assert metrics["precision"] == pytest.approx(0.2 / 5)
    assert (metrics["accuracy_back"], metrics["accuracy_mean"]) == (1.0, 1.0)


def test_one_pair_on_three_ranks(ranks):
    assert set(on_any_ranks(ranks, LoadedSet(Bitext("one", ["alpha"], ["beta"])))["one"].values()) == {1.0}


def evaluate_real(world, directory, data):
    """Metrics of all-MiniLM-L6-v2, unsharded: only the search is divided among ranks."""
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(directory), 256)
    encoder = SentenceEncoder(MeanPooled(directory), tokenizer, world, chunk_tokens=4096)
    return Evaluator([LoadedSet(data)], encoder, world).evaluate()[data.name]


@pytest.mark.slow
def test_metrics_of_minilm(ranks, minilm_dir, shared_data):
    path = shared_data / "tatoeba" / "deu-eng.tsv"
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    data = Bitext("deu-eng", [row["deu"] for row in rows], [row["eng"] for row in rows])
    results = ranks(2, evaluate_real, minilm_dir, data)
    assert results[0] == results[1]
    assert results[0]["accuracy"] == pytest.approx(0.0860, abs=5e-4)
    assert results[0]["accuracy_back"] == pytest.approx(0.1670, abs=5e-4)
