"""Commands on the directory of a late-interaction model give what sentence-transformers computes with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling

from embedtrain import evaluate, load_encoder, train
from embedtrain.errors import ConfigError
from tests.late_interaction_models import PUNCTUATION, multi_vector_model, save_backbone
from tests.search_commands import assert_found, assert_mined
from tests.small import WORDS, text

CORPUS = {f"d{i}": text(i, 2 + i % 9) + f", {WORDS[i % 7]}." for i in range(40)}
QUERIES = {f"q{i}": f"{WORDS[i]} {WORDS[i * 5 % 13]}" for i in range(12)}
RELEVANT = {f"q{i}": {f"d{i}", f"d{i * 3}"} for i in range(12)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late-interaction")
    backbone = save_backbone(folder / "backbone", "bert")
    expansion = {"strategy": "fixed", "length": 9, "attend": False}
    prompts = {"query": "mu ", "document": "nu "}
    model = multi_vector_model(
        backbone, skip=PUNCTUATION, prompts=prompts, document_length=12, query_expansion=expansion
    )
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    return MultiVectorEncoder(str(model_dir), device="cpu")


@pytest.fixture(scope="module")
def their_scores(theirs: Any) -> torch.Tensor:
    """Of all queries and documents, [Q, N]."""
    queries, documents = theirs.encode_query(list(QUERIES.values())), theirs.encode_document(list(CORPUS.values()))
    scores: torch.Tensor = theirs.similarity(queries, documents)
    return scores


def test_evaluate(model_dir: Path, theirs: Any, tmp_path: Path) -> None:
    sets = {"name": "set", "queries": QUERIES, "corpus": CORPUS, "relevant_docs": RELEVANT}
    options: dict[str, Any] = {"metrics": ["ndcg@10", "mrr@10", "map@100"], "precision": "fp32"}
    options |= {"vectors_dir": str(tmp_path / "vectors"), "output_dir": str(tmp_path / "out"), "truncate_dims": [4]}
    metrics = evaluate(model_dir, sets, quiet=True, **options)
    expected = MultiVectorInformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, name="set", write_csv=False)(theirs)
    for name in options["metrics"]:
        assert metrics["set"][name] == pytest.approx(expected[f"set_maxsim_{name}"], abs=1e-6)
    assert metrics["set@4"] != metrics["set"]
    assert evaluate(model_dir, sets, quiet=True, **options) == metrics  # from stored vectors


def test_as_reranker(model_dir: Path, their_scores: torch.Tensor, tmp_path: Path) -> None:
    """The best documents of BM25, and of the model itself, in the order of the model."""
    pytest.importorskip("bm25s")
    sets = {"name": "set", "queries": QUERIES, "corpus": CORPUS, "relevant_docs": RELEVANT}
    options: dict[str, Any] = {"reranker": str(model_dir), "rerank_depth": 5, "metrics": ["ndcg@10"], "quiet": True}
    options |= {"precision": "fp32", "save_runs": True, "output_dir": str(tmp_path)}
    metrics = evaluate(model_dir, sets, first_stage=["bm25", "model"], **options)
    assert list(metrics) == ["set", "set+bm25", "set+bm25+reranker", "set+reranker"]
    runs = {}
    for name in ("set+bm25", "set+bm25+reranker"):
        lines = [line.split() for line in (tmp_path / "runs" / f"{name}.run").read_text().splitlines()]
        runs[name] = [(query, document, float(score)) for query, _, document, _, score, _ in lines]
    assert {query for query, *_ in runs["set+bm25"]} >= {query for query, *_ in runs["set+bm25+reranker"]}
    assert len(runs["set+bm25+reranker"]) > len(QUERIES)
    for query, document, score in runs["set+bm25+reranker"]:
        assert (query, document) in {actual[:2] for actual in runs["set+bm25"]}
        assert score == pytest.approx(float(their_scores[int(query[1:]), int(document[1:])]), abs=1e-5)
    with pytest.raises(ConfigError, match=r"^reranker.document_windows=true: .*MultiVectorEncoder"):
        reranker = {"path": str(model_dir), "document_windows": True}
        evaluate(model_dir, sets, quiet=True, output_dir=str(tmp_path / "other"), reranker=reranker)


@pytest.mark.slow
def test_metrics_during_training_are_those_of_the_exported_model(model_dir: Path, tmp_path: Path) -> None:
    sets = {"name": "set", "queries": QUERIES, "corpus": CORPUS, "relevant_docs": RELEVANT}
    rows = [{"query": words, "positive": CORPUS[f"d{i}"]} for i, words in enumerate(QUERIES.values())]
    options: dict[str, Any] = {"model.kind": "late_interaction", "train": {"steps": 2, "global_batch_size": 4}}
    options |= {"parallel.precision": "fp32", "tracking.report": False, "optim.lr": 1e-3}
    options |= {"checkpoint.best_metric": "set/ndcg@10", "evaluation.truncate_dims": [4]}
    trained = train(
        data=rows, model=model_dir, evaluation=sets, output_dir=tmp_path / "run", options=options, quiet=True
    )
    measured = evaluate(
        trained, sets, precision="fp32", truncate_dims=[4], output_dir=str(tmp_path / "out"), quiet=True
    )
    assert trained.metrics.keys() == measured.keys()
    for name, metrics in measured.items():
        assert trained.metrics[name] == pytest.approx(metrics, abs=1e-6), name
    moods = {"path": str(tmp_path / "moods.jsonl"), "kind": "clustering"}
    Path(moods["path"]).write_text(json.dumps({"sentences": [*WORDS], "labels": [i % 3 for i in range(len(WORDS))]}))
    with pytest.raises(
        ConfigError, match=r"^evaluation.sets: moods .*clustering.*late_interaction computes a vector per"
    ):
        options["checkpoint.best_metric"] = None
        train(data=rows, model=model_dir, evaluation=moods, output_dir=tmp_path / "not", options=options, quiet=True)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"_id": d, "text": words}) + "\n" for d, words in CORPUS.items()))
    return path


def test_search(model_dir: Path, their_scores: torch.Tensor, corpus: Path) -> None:
    assert_found(model_dir, corpus, QUERIES["q3"], their_scores[3])


def test_mine(model_dir: Path, their_scores: torch.Tensor, corpus: Path, tmp_path: Path) -> None:
    assert_mined(model_dir, [*QUERIES.values()], [*CORPUS.values()], corpus, their_scores, tmp_path)


def test_load_encoder(model_dir: Path, theirs: Any) -> None:
    with load_encoder(model_dir, quiet=True) as encoder:
        assert encoder.similarity_fn_name == "maxsim"
        for ours, other in (
            (encoder.encode_queries, theirs.encode_query),
            (encoder.encode_documents, theirs.encode_document),
        ):
            for own, expected in zip(ours(list(CORPUS.values())), other(list(CORPUS.values())), strict=True):
                torch.testing.assert_close(own, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("option", ["pooling=mean", "normalize=false"])
def test_options_of_dense_models_are_rejected(model_dir: Path, option: str) -> None:
    name, value = option.split("=")
    with pytest.raises(ConfigError, match=f"^{option}: .*MultiVectorEncoder"):
        load_encoder(model_dir, quiet=True, **{name: {"false": False}.get(value, value)})


def test_sets_that_need_a_vector_per_text_are_rejected(model_dir: Path, tmp_path: Path) -> None:
    table = tmp_path / "moods.jsonl"
    table.write_text("".join(json.dumps({"text": f"{WORDS[i]} a", "label": i % 2}) + "\n" for i in range(8)))
    sets = [{"path": str(table), "train": str(table), "kind": "classification"}]
    with pytest.raises(ConfigError, match=r"^sets: .*classification.*late_interaction computes a vector per token"):
        evaluate(model_dir, sets, quiet=True, output_dir=str(tmp_path / "out"))


def test_token_pooling(model_dir: Path, theirs: Any, tmp_path: Path) -> None:
    """An index with half of the vectors gives the scores of sentence-transformers with its pooling."""
    sets = {"name": "set", "queries": QUERIES, "corpus": CORPUS, "relevant_docs": RELEVANT}
    options: dict[str, Any] = {"metrics": ["ndcg@10"], "precision": "fp32", "save_runs": True, "quiet": True}
    options["vectors_dir"] = str(tmp_path / "vectors")
    plain = evaluate(model_dir, sets, output_dir=str(tmp_path / "plain"), **options)
    options |= {"index": {"token_pooling": 2}, "output_dir": str(tmp_path / "pooled")}
    metrics = evaluate(model_dir, sets, **options)
    pooled = theirs.encode_document(list(CORPUS.values()), token_pooling=HierarchicalTokenPooling(pool_factor=2))
    pooled = [torch.nn.functional.normalize(vectors, dim=-1) for vectors in pooled]  # as versions from 6.2 on
    assert sum(map(len, pooled)) < 0.7 * sum(map(len, theirs.encode_document(list(CORPUS.values()))))
    expected = theirs.similarity(theirs.encode_query(list(QUERIES.values())), pooled)
    for line in (tmp_path / "pooled" / "runs" / "set.run").read_text().splitlines():
        query, _, document, _, score, _ = line.split()
        assert float(score) == pytest.approx(float(expected[int(query[1:]), int(document[1:])]), abs=1e-5)
    assert metrics != plain
    assert evaluate(model_dir, sets, **options) == metrics  # from stored vectors, which are not those of before
