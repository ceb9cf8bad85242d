"""Graphs of exports in place of weights: what commands compute with `backend=onnx`."""

import pytest
import torch

from embedtrain import evaluate
from embedtrain.config.evaluation import Backend, EvaluationSet
from embedtrain.config.recipe import ModelConfig, Precision
from embedtrain.config.reranker import RerankerConfig
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import joined_world
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.evaluation.sets import load_sets
from embedtrain.export.graph_metrics import GraphMetrics
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.score import PairScorer
from embedtrain.loading.encoder_model import load_encoder_model
from embedtrain.loading.reranker import load_reranker, open_reranker
from embedtrain.models.source import open_model_source
from embedtrain.tracking.console import Console
from tests.small import text, write_beir
from tests.verify.test_kinds import exported

pytest.importorskip("onnxruntime")
TEXTS = [text(seed, 1 + seed * 7 % 30) for seed in range(9)] + ["alpha, beta. alpha"]


@pytest.mark.parametrize(
    "kind", ["m3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dense", "late_interaction", "sparse"))]
)
def test_a_graph_encodes_as_the_weights_do(tmp_path, kind):
    model = ModelConfig(path=str(exported(kind, tmp_path, "onnx")))
    parts = []
    with joined_world() as world:
        for backend in (Backend.torch, Backend.onnx):
            loaded = load_encoder_model(model, Precision.fp32, world, backend=backend)
            encoder = SentenceEncoder.from_model(loaded, world, chunk_tokens=64)
            parts.append([encoder.encode(TEXTS, "mu ", role=role) for role in TextRole])
    for expected, part in zip(*parts, strict=True):
        torch.testing.assert_close(part.values, expected.values, rtol=0, atol=1e-5)
        assert expected.sizes is None or part.sizes.tolist() == expected.sizes.tolist()


@pytest.mark.slow
def test_a_graph_scores_pairs_as_the_weights_do(tmp_path):
    model, scores = str(exported("cross_encoder", tmp_path, "onnx")), []
    with joined_world() as world:
        for backend in (Backend.torch, Backend.onnx):
            config = RerankerConfig(path=model, backend=backend)
            source = open_reranker(config, world, trust_remote_code=False)
            scorer = PairScorer.from_model(load_reranker(source, config, Precision.fp32, world), world, chunk_tokens=64)
            scores.append(scorer.score(TEXTS, TEXTS[::-1]))
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-5)


def test_evaluation_of_a_graph(tmp_path):
    model, dev = exported("dense", tmp_path, "onnx"), write_beir(tmp_path / "dev", 20)
    measured = [
        evaluate(model, [str(dev)], backend=backend, quiet=True, output_dir=str(tmp_path / "evaluation"))["dev"]
        for backend in ("torch", "onnx")
    ]
    assert measured[1] == pytest.approx(measured[0], abs=1e-4)
    with pytest.raises(ConfigError, match=r"backend=onnx_int8: .*model_quantized\.onnx is missing; export with"):
        evaluate(model, [str(dev)], backend="onnx_int8", quiet=True)
    with pytest.raises(ConfigError, match=r"pooling=.*is not for graphs \(backend=onnx\)"):
        evaluate(model, [str(dev)], backend="onnx", pooling="cls", quiet=True)


def test_a_graph_with_a_worse_metric_is_rejected(tmp_path):
    dev, model = write_beir(tmp_path / "dev", 20), exported("dense", tmp_path, "onnx", "onnx_int8")
    source = open_model_source(ModelConfig(path=str(model)))
    with joined_world() as world:
        metrics = GraphMetrics(load_sets([EvaluationSet(path=str(dev))], world), world, Console(), max_loss=0.02)
        (value,) = metrics(source, "onnx").values()
        assert 0 < value < 1
        metrics.expected = {"dev ndcg@10": 1.1}
        with pytest.raises(CheckpointError, match=r"onnx_int8: dev ndcg@10 is .*more than max_metric_loss=0\.02 below"):
            metrics(source, "onnx_int8")
