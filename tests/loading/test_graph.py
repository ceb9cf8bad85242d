"""Graphs of exports in place of weights: what commands compute with `backend=onnx`."""

import shutil
from pathlib import Path

import pytest
import torch

from embedtrain import evaluate
from embedtrain.commands.export.convert import GraphMetrics
from embedtrain.config.command_options import RerankerConfig
from embedtrain.config.evaluation import Backend, EvaluationSet
from embedtrain.config.recipe import Precision
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import joined_world
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.evaluation.sets import load_sets
from embedtrain.formats import onnx
from embedtrain.formats.onnx import GRAPH
from embedtrain.formats.source import open_model_source
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import load_encoder_model, load_reranker, open_reranker
from embedtrain.inference.loading.graph import GraphEncoder
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.tracking.console import Console
from tests.small import model_options, text, write_beir
from tests.verify.test_kinds import exported

pytest.importorskip("onnxruntime")
TEXTS = [text(seed, 1 + seed * 7 % 30) for seed in range(9)] + ["alpha, beta. alpha"]


@pytest.mark.parametrize(
    "kind", ["m3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dense", "late_interaction", "sparse"))]
)
def test_a_graph_encodes_as_the_weights_do(tmp_path, kind):
    model = model_options(path=str(exported(kind, tmp_path, "onnx")))
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
    source = open_model_source(model_options(path=str(model)))
    with joined_world() as world:
        metrics = GraphMetrics(load_sets([EvaluationSet(path=str(dev))], world), world, Console(), max_loss=0.02)
        (value,) = metrics(source, "onnx").values()
        assert 0 < value < 1
        metrics.expected = {"dev ndcg@10": 1.1}
        with pytest.raises(CheckpointError, match=r"onnx_int8: dev ndcg@10 is .*more than max_metric_loss=0\.02 below"):
            metrics(source, "onnx_int8")


def change_graph(path: Path, change: str) -> None:
    """Replace the first output of a graph by one that never comes, or has another form, or add an input."""
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(str(path))
    graph = model.graph
    name = "sentence_embedding"
    number, output = next((n, node) for n, node in enumerate(graph.output) if node.name == name)
    for node in graph.node:
        node.output[:] = ["before" if one == name else one for one in node.output]
    if change == "loop":
        flag, rows = helper.make_tensor_value_info, ["a", "b"]
        body = helper.make_graph(
            [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["x"], ["x2"])],
            "body",
            [flag("i", TensorProto.INT64, []), flag("c", TensorProto.BOOL, []), flag("x", TensorProto.FLOAT, rows)],
            [flag("c2", TensorProto.BOOL, []), flag("x2", TensorProto.FLOAT, rows)],
        )
        true = helper.make_tensor("true", TensorProto.BOOL, [], [True])
        graph.node.append(helper.make_node("Constant", [], ["true"], value=true))
        graph.node.append(helper.make_node("Loop", ["", "true", "before"], [name], body=body))
    elif change == "shape":
        graph.node.append(helper.make_node("Transpose", ["before"], [name]))
    elif change == "type":
        graph.node.append(helper.make_node("Cast", ["before"], [name], to=TensorProto.INT64))
        output.type.tensor_type.elem_type = TensorProto.INT64
    else:
        graph.node.append(helper.make_node("Identity", ["before"], [name]))
    if change == "input":
        graph.input.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["a", "b"]))
    if change == "output":
        del graph.output[number]
    onnx.save(model, str(path))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return exported("dense", tmp_path_factory.mktemp("dense"), "onnx")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("loop", "needs more than 1 s"),
        ("shape", r"its output sentence_embedding has the shape \[32, 1\] for \[1, 2\] tokens"),
        ("type", "its output sentence_embedding is not a tensor of floating-point numbers"),
        ("input", "has the input 'position_ids'"),
        ("output", "has no output sentence_embedding"),
    ],
)
def test_graphs_of_something_else(tmp_path, monkeypatch, dense, change, part):
    pytest.importorskip("onnx")
    monkeypatch.setattr(onnx, "_RUN_SECONDS", 1.0)
    monkeypatch.setattr(onnx, "_TOKEN_SECONDS", 0.0)
    directory = shutil.copytree(dense, tmp_path / "model")
    source = open_model_source(model_options(path=str(directory)))
    change_graph(directory / GRAPH, change)
    with pytest.raises(CheckpointError, match=rf"model\.onnx.* {part}") as raised:
        GraphEncoder(directory / GRAPH, source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("of_folder", [False, True])
def test_graphs_are_read_through_no_links(tmp_path, dense, of_folder):
    directory = shutil.copytree(dense, tmp_path / "model")
    source = open_model_source(model_options(path=str(directory)))
    link = (directory / GRAPH).parent if of_folder else directory / GRAPH
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="outside the model directory"):
        GraphEncoder(directory / GRAPH, source)


def test_openvino_opens_no_graph_with_a_loop(tmp_path, dense):
    openvino = pytest.importorskip("openvino")
    directory = shutil.copytree(dense, tmp_path / "model")
    change_graph(directory / GRAPH, "loop")
    path = tmp_path / "model" / "openvino_model.xml"
    openvino.save_model(openvino.convert_model(str(directory / GRAPH)), str(path))
    with pytest.raises(CheckpointError, match="has a Loop, which may never end"):
        onnx.open_graph(path, directory)
