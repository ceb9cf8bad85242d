"""Vectors are compared by the similarity of their model's directory, everywhere as sentence-transformers does."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from embedtrain import evaluate, load_encoder, train
from embedtrain.commands.merge import run as merge
from embedtrain.commands.merge.options import MergeOptions
from embedtrain.commands.verify.engines import probe_model, run_engine
from embedtrain.config.losses import (
    CombinedConfig,
    CoSENTConfig,
    Distance,
    InfoNCEConfig,
    MarginMSEConfig,
    MatryoshkaConfig,
    MSEConfig,
    Similarity,
    TripletConfig,
    VectorSimilarity,
)
from embedtrain.distributed.world import joined_world
from embedtrain.errors import ConfigError, EmbedtrainError, ModelError
from embedtrain.formats.source import CommandModel, open_model_source
from embedtrain.training.inputs import with_similarity
from tests.marks import slow_but
from tests.search_commands import assert_found, assert_mined
from tests.small import WORDS, model_options, save_guide, small_model, text

CORPUS = {f"d{i}": text(i, 2 + i % 9) for i in range(40)}
QUERIES = {f"q{i}": f"{WORDS[i]} {WORDS[i * 5 % 13]} a" for i in range(12)}
RELEVANT = {f"q{i}": {f"d{i}", f"d{i * 3}"} for i in range(12)}
SETS = {"name": "set", "queries": QUERIES, "corpus": CORPUS, "relevant_docs": RELEVANT}
METRICS = ["ndcg@10", "mrr@10", "map@100"]
NAMES = ["cosine", "dot", "euclidean", "manhattan"]
TRAIN: dict[str, Any] = {
    "train": {"steps": 2, "global_batch_size": 8, "log_every": 1},
    "parallel": {"precision": "fp32", "strategy": "fsdp"},
    "tracking.report": False,
    "optim.lr": 1e-3,
}
ROWS = [{"query": query, "positive": list(CORPUS.values())[i + 5]} for i, query in enumerate(QUERIES.values())]


def with_settings(directory: Path, target: Path, **settings: Any) -> Path:
    """A copy with these entries of config_sentence_transformers.json."""
    shutil.copytree(directory, target, dirs_exist_ok=True)
    path = target / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return target


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model with each similarity: vectors of unequal lengths, without Normalize."""
    folder = tmp_path_factory.mktemp("similarities")
    plain = save_guide(small_model("bert"), folder)
    weights = load_file(plain / "model.safetensors")
    embeddings = weights["embeddings.word_embeddings.weight"]
    embeddings *= torch.linspace(1, 60, len(embeddings))[:, None]
    # Lengths of vectors differ with what the layer norm's largest factors scale.
    last = max(name for name in weights if name.endswith("output.LayerNorm.weight"))
    weights[last] *= torch.linspace(0.1, 4, len(weights[last]))
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    modules = [
        module for module in json.loads((plain / "modules.json").read_text()) if "Normalize" not in module["type"]
    ]
    (plain / "modules.json").write_text(json.dumps(modules))
    return {name: with_settings(plain, folder / name, similarity_fn_name=name) for name in NAMES}


def metrics_of(model: Any, out: Path, **options: Any) -> dict[str, float]:
    more: dict[str, Any] = {"metrics": METRICS, "precision": "fp32", "quiet": True, "chunk_tokens": 64} | options
    measured: dict[str, float] = evaluate(model, SETS, output_dir=out, **more)["set"]
    return measured


def test_evaluation_is_that_of_sentence_transformers(directories, tmp_path):
    seen = []
    for name, directory in directories.items():
        theirs = SentenceTransformer(str(directory), device="cpu")
        expected = InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, name="set", write_csv=False)(theirs)
        # The files of another similarity's vectors are in the same directory.
        metrics = metrics_of(directory, tmp_path / name, vectors_dir=str(tmp_path / "vectors"))
        for metric in METRICS:
            assert metrics[metric] == pytest.approx(expected[f"set_{name}_{metric}"], abs=1e-6), (name, metric)
        seen.append(metrics["ndcg@10"])
    assert len(set(seen)) == len(NAMES), "the models differ, so that the test can fail"
    options = {"similarity": "dot", "vectors_dir": str(tmp_path / "vectors")}
    assert metrics_of(directories["cosine"], tmp_path / "o", **options)["ndcg@10"] == seen[1]


@pytest.mark.parametrize("name", slow_but(["euclidean"], NAMES[1:]))
def test_mining_and_encoders(directories, tmp_path, name):
    theirs = SentenceTransformer(str(directories[name]), device="cpu")
    queries, documents = (theirs.encode(list(texts.values())) for texts in (QUERIES, CORPUS))
    scores = theirs.similarity(queries, documents)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": d, "text": words}) + "\n" for d, words in CORPUS.items()))
    assert_mined(directories[name], list(QUERIES.values()), list(CORPUS.values()), corpus, scores, tmp_path)
    if name == "manhattan":
        assert_found(directories[name], corpus, QUERIES["q3"], scores[3])
    with load_encoder(directories[name], quiet=True) as encoder:
        assert encoder.similarity_fn_name == name
        torch.testing.assert_close(encoder.similarity(queries, documents), scores)


@pytest.mark.quick("options0-vectors: .*euclidean")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vectors": ["int8"]}, "vectors: .*euclidean"),
        ({"index": {"scan_dtype": "int8"}}, "index.scan_dtype=int8: .*euclidean"),
    ],
)
def test_what_only_inner_products_have_is_refused_for_distances(directories, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        metrics_of(directories["euclidean"], tmp_path, **options)
    metrics_of(directories["dot"], tmp_path, **options)


def test_search_compares_by_another_similarity_if_it_is_set(directories, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": d, "text": words}) + "\n" for d, words in CORPUS.items()))
    theirs = SentenceTransformer(str(directories["dot"]), device="cpu")
    scores = theirs.similarity(*(theirs.encode(texts) for texts in ([QUERIES["q3"]], list(CORPUS.values()))))[0]
    assert_found(directories["cosine"], corpus, QUERIES["q3"], scores, "similarity=dot")


@pytest.mark.slow  # tests/verify runs the same engine with other deviations
def test_verify_compares_the_similarity_of_sentence_transformers(directories):
    with joined_world() as world:
        probe = probe_model(CommandModel(path=str(directories["manhattan"])), world)
    assert run_engine("sentence_transformers", sys.executable, probe).passes(1e-4)
    other = replace(probe, request={**probe.request, "model": str(directories["dot"])})
    outcome = run_engine("sentence_transformers", sys.executable, other)
    assert not outcome.passes(1e-4)
    assert outcome.reason == "it compares vectors by similarity_fn_name=dot, and embedtrain by manhattan"


def test_unknown_similarities_of_files_are_refused(directories, tmp_path):
    directory = with_settings(directories["dot"], tmp_path / "hamming", similarity_fn_name="hamming")
    with pytest.raises(ModelError, match=r"similarity_fn_name='hamming'.*manhattan"):
        open_model_source(model_options(path=str(directory)))


def stored_similarity(directory: Path) -> str:
    name: str = json.loads((directory / "config_sentence_transformers.json").read_text())["similarity_fn_name"]
    return name


@pytest.mark.parametrize("similarity", [pytest.param("cosine", marks=pytest.mark.slow), "dot"])
def test_training_starts_from_the_similarity_of_the_directory(directories, tmp_path, capsys, similarity):
    """The directory's, or that of the option, and then a directory with the other one trains alike."""
    losses = {}
    other = {"dot": "cosine", "cosine": "dot"}[similarity]
    for name, option in ((similarity, None), (other, similarity)):
        loss = {"loss.similarity": option} if option else {}
        out = tmp_path / f"{name}-{option}"
        trained = train(
            model=directories[name], data=ROWS, evaluation=SETS, output_dir=out, options=TRAIN | loss, quiet=True
        )
        losses[name, option] = [row["loss"] for row in trained.history if "loss" in row]
        assert stored_similarity(trained.model_dir) == (option or name)
        shown = {"dot": "inner product (`dot`)", "cosine": "cosine similarity"}[option or name]
        assert f"The model compares vectors by {shown}." in (trained.model_dir / "README.md").read_text()
        # The evaluation of the run is that of the directory that it wrote, as sentence-transformers measures it.
        theirs = SentenceTransformer(str(trained.model_dir), device="cpu")
        expected = InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, name="set", write_csv=False)(theirs)
        assert trained.metrics["set"]["ndcg@10"] == pytest.approx(expected[f"set_{option or name}_ndcg@10"], abs=1e-6)
    assert losses[similarity, None] == losses[other, similarity]


def test_a_loss_that_lacks_the_similarity_of_the_directory_is_refused(directories, tmp_path):
    with pytest.raises(ConfigError, match=r"loss\.similarity: .*euclidean.*infonce.*cosine, dot"):
        train(model=directories["euclidean"], data=ROWS, output_dir=tmp_path / "out", options=TRAIN, quiet=True)


@pytest.mark.parametrize(
    ("stored", "losses", "trained"),
    [
        ("dot", [InfoNCEConfig()], "dot"),
        ("cosine", [TripletConfig(distance=Distance.manhattan)], "manhattan"),
        ("euclidean", [TripletConfig()], "euclidean"),
        ("cosine", [MarginMSEConfig()], "dot"),
        ("dot", [CoSENTConfig()], "cosine"),
        ("cosine", [InfoNCEConfig(similarity=Similarity.dot, matryoshka=MatryoshkaConfig(dims=[16]))], "cosine"),
        ("dot", [CombinedConfig(losses=[InfoNCEConfig(), MSEConfig()])], "dot"),
        ("cosine", [CombinedConfig(losses=[InfoNCEConfig(), MSEConfig()])], "cosine"),  # two of them
    ],
)
def test_the_trained_similarity(directories, stored, losses, trained):
    model = model_options(path=str(directories[stored]))
    source, resolved = with_similarity(model, open_model_source(model), losses)
    assert source.vectors.similarity.value == trained
    for loss in resolved:
        for part in getattr(loss, "losses", [loss]):
            assert getattr(part, "similarity", "") is not None and getattr(part, "distance", "") is not None
    chosen = model_options(path=str(directories[stored]), similarity=VectorSimilarity.cosine)
    assert with_similarity(chosen, open_model_source(chosen), resolved)[0].vectors.similarity is VectorSimilarity.cosine


def test_a_model_that_normalises_keeps_its_similarity(directories):
    model = model_options(path=str(directories["euclidean"]), normalize=True)
    source = open_model_source(model)
    assert with_similarity(model, source, [InfoNCEConfig(similarity=Similarity.dot)])[0] == source


def test_guides_are_compared_as_their_directory_says(directories, tmp_path):
    losses = []
    for name in ("cosine", "dot"):
        options = TRAIN | {"loss.teacher": str(directories[name])}
        trained = train(
            model=directories["cosine"], loss="distill_similarities", data=ROWS, output_dir=tmp_path / name,
            options=options, quiet=True,
        )  # fmt: skip
        losses.append(next(row["loss"] for row in trained.history if "loss" in row))
    assert losses[0] == pytest.approx(0, abs=1e-6), "the model itself is the teacher"
    assert losses[1] > 0.01
    with pytest.raises(ConfigError, match=r"guide or teacher .*manhattan distance"):
        train(
            model=directories["cosine"], data=ROWS, output_dir=tmp_path / "m",
            options=TRAIN | {"loss.guide": str(directories["manhattan"])}, quiet=True,
        )  # fmt: skip


def test_models_of_different_similarities_are_not_merged(directories, tmp_path):
    models = [str(directories[name]) for name in ("cosine", "dot")]
    with pytest.raises(EmbedtrainError, match="similarity of vectors is 'dot', not 'cosine'"):
        merge(MergeOptions(models=models, output_dir=str(tmp_path / "merged")))
    merge(MergeOptions(models=[models[1], models[1]], weights=[0.5, 0.5], output_dir=str(tmp_path / "merged")))
    assert stored_similarity(tmp_path / "merged") == "dot"
