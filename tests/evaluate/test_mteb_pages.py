"""Benchmarks of pages through mteb: the scores of mteb with sentence-transformers, on any number of ranks."""

import json
from pathlib import Path

import mteb
import numpy as np
import pytest
import pytrec_eval
from mteb.models.sentence_transformer_wrapper import MultiVectorWrapper, SentenceTransformerEncoderWrapper
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.recipe import Precision
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.sets import load_sets
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import load_encoder_model
from tests.evaluate.mteb_ranks import refused, run_pages, vectors_of_pages
from tests.evaluate.page_tasks import COPIES, LANGUAGES, NUM_PAGES, judgements, page, page_task, queries
from tests.evaluate.test_mteb_client import assert_same, scores
from tests.image_text.models import save_image_text
from tests.late_vision_models import TRANSFORMERS, save_late_model
from tests.small import model_options, save_guide, small_model
from tests.vision_language.models import save_vision_model

pytestmark = pytest.mark.filterwarnings("ignore")  # mteb's and datasets'


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_image_text("clip", folder)
    return folder


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    return {name: save(folder / name) for name, save in COPIES.items()}


def only(copies, *names):
    return {name: copies[name] for name in names}


def read_results(folder: Path) -> dict:
    files = [json.loads(path.read_text()) for path in folder.glob("results/*/*/*Retrieval*.json")]
    return {file["task_name"]: {split: scores(rows) for split, rows in file["scores"].items()} for file in files}


_ONE_VECTOR = (SentenceTransformer, SentenceTransformerEncoderWrapper)


def expected(directory: Path, copies: dict[str, Path], modalities=("text", "image"), of=_ONE_VECTOR) -> dict:
    model_class, wrapper_class = of
    wrapper = wrapper_class(model_class(str(directory), device="cpu"))
    wrapper.mteb_model_meta = wrapper.mteb_model_meta.model_copy(update={"modalities": list(modalities)})
    results = {}
    for name, path in copies.items():
        (result,) = mteb.evaluate(
            wrapper, page_task(name, path), cache=None, co2_tracker=False, show_progress_bar=False
        ).task_results
        results[name] = {split: scores(rows) for split, rows in result.scores.items()}
    return results


def of_trec_eval(vectors, metric: str) -> float:
    """nDCG of searching pages for queries by cosine, in float64."""
    texts, pages = (
        rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1)[:, None] for rows in vectors
    )
    run = {f"q{q}": {f"d{d}": float(score) for d, score in enumerate(row)} for q, row in enumerate(texts @ pages.T)}
    gains: dict[str, dict[str, int]] = {}
    for query, number, score in judgements():
        gains.setdefault(f"q{query}", {})[f"d{number}"] = score
    measured = pytrec_eval.RelevanceEvaluator(gains, {metric}).evaluate(run)
    return float(np.mean([values[metric] for values in measured.values()]))


def test_tasks_of_pages_score_as_with_sentence_transformers(ranks, models, copies, tmp_path):
    """Files of pages are sent in several parts; the figure is the task's own, as with pytrec_eval on the vectors."""
    copies = only(copies, "Vidore2ESGReportsRetrieval")
    metrics, failures = ranks(2, run_pages, models / "clip", tmp_path, copies, "image_text", 4000)[0]
    assert not failures
    reference = expected(models / "clip", copies)
    assert_same(read_results(tmp_path), reference)
    vectors = ranks(2, vectors_of_pages, models / "clip", queries("french"), [page(i) for i in range(NUM_PAGES)])[0]
    figure = of_trec_eval(vectors, "ndcg_cut_5")
    assert 0.1 < figure < 0.9, "a score that says nothing"
    assert metrics["Vidore2ESGReportsRetrieval/french/test"] == {"ndcg_at_5": pytest.approx(figure, abs=1e-5)}
    values = [metrics[f"Vidore2ESGReportsRetrieval/{language}/test"]["ndcg_at_5"] for language in LANGUAGES]
    assert metrics["Vidore2ESGReportsRetrieval"] == {"ndcg_at_5": pytest.approx(np.mean(values))}


@pytest.mark.slow
def test_the_same_floats_on_any_number_of_ranks(ranks, models, copies, tmp_path):
    """Versions 2 and 3 of ViDoRe, and JinaVDR."""
    copies = {name: path for name, path in copies.items() if not name.endswith(".v2")}
    answers = [
        answer
        for size in (1, 2, 3)
        for answer in ranks(size, run_pages, models / "clip", tmp_path / str(size), copies, "image_text", 9000)
    ]
    assert all(answer == answers[0] for answer in answers)
    metrics, failures = answers[0]
    assert not failures
    assert {name: set(metrics[name]) for name in copies} == {
        "Vidore2ESGReportsRetrieval": {"ndcg_at_5"},
        "Vidore3FinanceEnRetrieval": {"ndcg_at_10"},
        "JinaVDRMedicalPrescriptionsRetrieval": {"ndcg_at_5"},
    }
    reference = expected(models / "clip", copies)
    for size in (1, 2, 3):
        assert_same(read_results(tmp_path / str(size)), reference)


@pytest.mark.slow
def test_late_interaction_over_pages(ranks, copies, tmp_path):
    """ColQwen2, as sentence-transformers encodes and compares its vectors, on any number of ranks."""
    directory = save_late_model(TRANSFORMERS, "qwen2_vl", tmp_path)
    copies = only(copies, "Vidore3FinanceEnRetrieval")
    answers = [
        answer
        for size in (1, 2, 3)
        for answer in ranks(size, run_pages, directory, tmp_path / str(size), copies, "late_interaction", 9000)
    ]
    assert all(answer == answers[0] for answer in answers)
    assert not answers[0][1]
    reference = expected(directory, copies, of=(MultiVectorEncoder, MultiVectorWrapper))
    assert_same(read_results(tmp_path / "2"), reference)
    scored = reference["Vidore3FinanceEnRetrieval"]["test"]["french"]["ndcg_at_10"]
    assert 0.1 < scored < 0.9, "a score that says nothing"


@pytest.mark.slow
def test_pages_with_their_text(ranks, models, copies, tmp_path):
    """A vision-language model reads both as one item, in the order of the columns; a model of texts reads the text."""
    copies = only(copies, "Vidore3FinanceEnRetrieval.v2")
    vision = save_vision_model("modernvbert", tmp_path)
    metrics, failures = ranks(2, run_pages, vision, tmp_path / "vision", copies, "dense", 9000, "mean")[0]
    assert not failures
    assert_same(read_results(tmp_path / "vision"), expected(vision, copies))
    texts = save_guide(small_model("bert"), tmp_path / "texts")
    of_texts, failures = ranks(2, run_pages, texts, tmp_path / "out", copies)[0]
    assert not failures
    assert_same(read_results(tmp_path / "out"), expected(texts, copies, ("text",)))
    assert of_texts != metrics


def test_items_that_a_model_does_not_read(ranks, models, copies, tmp_path):
    texts = save_guide(small_model("bert"), tmp_path / "texts")
    for directory, kind, name, words in (
        (texts, "dense", "Vidore3FinanceEnRetrieval", "pictures alone, and the model reads texts alone"),
        (
            models / "clip",
            "image_text",
            "Vidore3FinanceEnRetrieval.v2",
            "has the pages of ViDoRe(v3.1) without their texts",
        ),
    ):
        for message in ranks(2, refused, directory, tmp_path / "out", only(copies, name), kind):
            assert f"mteb: {name} " in message
            assert message.endswith(words)


def of_sets(world, directory, sets):
    """The metrics of sets."""
    loaded = load_sets(sets, world, metrics=["ndcg@5", "ndcg@10"])
    model = load_encoder_model(model_options("image_text", path=str(directory)), Precision.fp32, world)
    return Evaluator(loaded, SentenceEncoder.from_model(model, world, chunk_tokens=64), world).evaluate()


@pytest.mark.slow
def test_copies_are_sets_as_well(ranks, models, copies, tmp_path):
    """The figures are those of the tasks of mteb; all languages at once is their mean."""
    copies = only(copies, "Vidore2ESGReportsRetrieval", "Vidore3FinanceEnRetrieval")
    v2, v3 = copies.values()
    sets = [EvaluationSet(path=str(v3), config=language, name=language) for language in LANGUAGES]
    measured = ranks(2, of_sets, models / "clip", [EvaluationSet(path=str(v2), name="v2"), *sets])[0]
    of_mteb = ranks(2, run_pages, models / "clip", tmp_path, copies, "image_text")[0][0]
    for language in LANGUAGES:
        figure = of_mteb[f"Vidore3FinanceEnRetrieval/{language}/test"]["ndcg_at_10"]
        assert measured[language]["ndcg@10"] == pytest.approx(figure, abs=1e-5)
    assert measured["v2"]["ndcg@5"] == pytest.approx(of_mteb["Vidore2ESGReportsRetrieval"]["ndcg_at_5"], abs=1e-5)
