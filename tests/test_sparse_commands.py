"""Commands on the directory of a learned sparse model give what sentence-transformers computes with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.modules import SpladePooling
from sentence_transformers.sparse_encoder.modules import Transformer as SparseTransformer

from embedtrain import evaluate, load_encoder
from tests.commands import call
from tests.search_commands import assert_found, assert_mined
from tests.small import WORDS, save_language_model, small_model, text
from tests.tracking.report.runs import make_run

CORPUS = {f"d{i}": text(i, 2 + i % 9) for i in range(40)}
QUERIES = {f"q{i}": f"{WORDS[i]} {WORDS[i * 5 % 13]}" for i in range(12)}
RELEVANT = {f"q{i}": {f"d{i}", f"d{i * 3}"} for i in range(12)}
SETS = {"name": "set", "queries": QUERIES, "corpus": CORPUS, "relevant_docs": RELEVANT}
METRICS = ["ndcg@10", "mrr@10", "map@100"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which most weights of words are 0."""
    folder = tmp_path_factory.mktemp("sparse")
    backbone = save_language_model(small_model("bert", kind="sparse", pooling=None), folder / "backbone")
    transformer = SparseTransformer(str(backbone), transformer_task="fill-mask", max_seq_length=48)
    with torch.no_grad():
        transformer.auto_model.get_output_embeddings().bias -= 1.0
    prompts = {"query": "mu ", "document": "nu "}
    model = SparseEncoder(modules=[transformer, SpladePooling("max")], prompts=prompts, device="cpu")
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    return SparseEncoder(str(model_dir), device="cpu")


@pytest.fixture(scope="module")
def their_scores(theirs: Any) -> torch.Tensor:
    """Of all queries and documents, [Q, N]."""
    queries, documents = (
        encode(list(texts.values()), convert_to_sparse_tensor=False)
        for encode, texts in ((theirs.encode_query, QUERIES), (theirs.encode_document, CORPUS))
    )
    assert 0.02 < (documents > 0).float().mean() < 0.25
    scores: torch.Tensor = queries.double() @ documents.double().T
    return scores.float()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"_id": d, "text": words}) + "\n" for d, words in CORPUS.items()))
    return path


def test_evaluate(model_dir: Path, theirs: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": METRICS, "precision": "fp32", "quiet": True, "chunk_tokens": 64}
    options |= {"vectors_dir": str(tmp_path / "vectors"), "output_dir": str(tmp_path / "out")}
    metrics = evaluate(model_dir, SETS, **options)
    expected = SparseInformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, name="set", write_csv=False)(theirs)
    for name in METRICS:
        assert metrics["set"][name] == pytest.approx(expected[f"set_dot_{name}"], abs=1e-6)
    files = list((tmp_path / "vectors").rglob("*.safetensors"))
    entries = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert "vectors" not in file.keys()  # noqa: SIM118
            entries += len(file.get_tensor("entries"))
    assert entries == int((theirs.encode_document(list(CORPUS.values()), convert_to_sparse_tensor=False) > 0).sum())
    assert evaluate(model_dir, SETS, **options) == metrics  # from stored vectors
    assert list((tmp_path / "vectors").rglob("*.safetensors")) == files


def test_search(model_dir: Path, their_scores: torch.Tensor, corpus: Path) -> None:
    assert "Warning" not in assert_found(model_dir, corpus, QUERIES["q3"], their_scores[3])


def test_mine(model_dir: Path, their_scores: torch.Tensor, corpus: Path, tmp_path: Path) -> None:
    assert_mined(model_dir, [*QUERIES.values()], [*CORPUS.values()], corpus, their_scores, tmp_path)


def test_load_encoder(model_dir: Path, theirs: Any) -> None:
    texts = list(CORPUS.values())
    with load_encoder(model_dir, quiet=True) as encoder:
        assert encoder.similarity_fn_name == "dot"
        for ours, other in (
            (encoder.encode_queries, theirs.encode_query),
            (encoder.encode_documents, theirs.encode_document),
        ):
            torch.testing.assert_close(
                torch.as_tensor(ours(texts)), other(texts, convert_to_sparse_tensor=False), atol=1e-5, rtol=0
            )


@pytest.mark.slow
def test_inspect_and_report(model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    """Lengths are those of the model's tokens, and the page of a run has the measures of sparse vectors."""
    rows = [{"query": words, "positive": CORPUS[f"d{i}"]} for i, words in enumerate(QUERIES.values())]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = call("inspect", f"data={data}", f"model={model_dir}", f"cache_dir={tmp_path / 'cache'}")
    assert "<s> mu alpha alpha </s>" in printed
    measures = ["queries/flops", "documents/active_words", "documents/empty_texts"]
    run = make_run(tmp_path / "run", extra_metrics=measures)
    call("report", str(run))
    page = (run / "report.html").read_text()
    assert "Active words of documents" in page
    assert "FLOPS of queries" in page
