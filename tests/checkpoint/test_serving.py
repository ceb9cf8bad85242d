"""The facts about serving engines, compared with the conditions that their own source has."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embedtrain.commands.verify import VERIFIED
from embedtrain.config.kind_settings import HeadActivation, HeadConfig
from embedtrain.config.kinds import kind_of_files, kinds
from embedtrain.config.recipe import Pooling
from embedtrain.formats.serving import SERVING_ENGINES, ServedModel, Severity, serving_section
from embedtrain.formats.source import open_model_source
from embedtrain.formats.weights import WeightPlan, create_model_directory
from embedtrain.models.types import DenseSource
from tests.checkpoint.exporting import architecture_of, export_model
from tests.checkpoint.tei_rules import TeiError, TeiModel, open_as_tei
from tests.conftest import ROOT
from tests.small import POOLINGS, model_options, save_language_model, save_small, small_model

TANH = "torch.nn.modules.activation.Tanh"
REGULAR = ["full_attention", "sliding_attention"] * 2
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 77.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Case:
    """An export, and what text-embeddings-inference makes of it: its pooling, or why it does not start."""

    architecture: str
    served: str  # pooling, or a part of the error
    deviations: tuple[str, ...] = ()  # parts of the reasons of the table for the image for GPUs, besides rounding
    config: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    argument: str | None = None  # --pooling


CASES = {
    "xlm-roberta, first token": Case("xlm-roberta", "cls", options={"pooling": Pooling.cls, "query_prompt": "alpha "}),
    "bert, own vocabulary": Case("bert", "mean", config={"vocab_size": 70}),
    "bert, last token": Case("bert", "not supported", ("last token",), options={"pooling": Pooling.last}),
    "bert, maximum": Case("bert", "the pooling is not", ("no maximum",), options={"pooling": Pooling.max}),
    "qwen3": Case("qwen3", "last_token"),
    "qwen3, bidirectional": Case("qwen3", "mean", options={"bidirectional": True, "pooling": Pooling.mean}),
    "llama, bidirectional": Case("llama", "mean", options={"bidirectional": True, "pooling": Pooling.mean}),
    "llama, scaled": Case(
        "llama", "rope scaling", ("scal",),
        config={"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 16}},
    ),
    "llama, other heads": Case("llama", "shape mismatch", ("head_dim",), config={"head_dim": 24}),
    "llama, biases": Case("llama", "last_token", ("biases of attention",), config={"attention_bias": True}),
    "mistral, bidirectional": Case("mistral", "mean", options={"bidirectional": True, "pooling": Pooling.mean}),
    "qwen2, bidirectional": Case("qwen2", "mean", options={"bidirectional": True, "pooling": Pooling.mean}),
    "modernbert": Case("modernbert", "mean", config={"num_hidden_layers": 4, "layer_types": REGULAR}),
    "modernbert, biases": Case(
        "modernbert", "mean", ("biases of layer norms",),
        config={"num_hidden_layers": 4, "layer_types": REGULAR, "norm_bias": True},
    ),
    "modernbert, irregular layers": Case(
        "modernbert", "global_attn_every_n_layers", ("regular distance",), config={"layer_types": REGULAR[1::-1]}
    ),
    "gemma3_text": Case("gemma3_text", "mean", options={"bidirectional": True}),
    "gemma3_text, scaled": Case(
        "gemma3_text", "mean", ("scaling of rotary",),
        config={"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 44.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        }},
    ),
    "dense heads": Case(
        "bert", "mean", options={"heads": [HeadConfig(out=48, activation=HeadActivation.tanh), HeadConfig(out=24)]}
    ),
    "dense head with GELU": Case(
        "bert", "unknown variant", ("GELU",), options={"heads": [HeadConfig(out=8, activation=HeadActivation.gelu)]}
    ),
    "reranker": Case("xlm-roberta", "cls", options={"kind": "cross_encoder"}),
    "reranker of modernbert": Case("modernbert", "cls", options={"kind": "cross_encoder"}),
    "reranker of a decoder": Case("qwen3", "not supported", ("reranker",), options={"kind": "cross_encoder"}),
    "sparse": Case("bert", "splade", options={"kind": "sparse"}, argument="splade"),
    "electra": Case("electra", "not supported", ("no implementation",)),
}  # fmt: skip


def exported(folder: Path, case: Case, **requested: Any) -> ServedModel:
    """The export, without weights that a training would have changed."""
    options = dict(case.options or {})
    kind = options.get("kind", "dense")
    small = small_model(case.architecture)
    config = small.config | (case.config or {})
    if kind == "dense":
        options.setdefault("pooling", POOLINGS.get(case.architecture, Pooling.mean))
    save = save_language_model if kind == "sparse" else save_small
    save(small_model(case.architecture, config=config), folder / "model")
    model = model_options(path=str(folder / "model"), **options)
    export_model(folder / "out", architecture_of(folder / "architecture", model), check=False, **requested)
    return opened(folder / "out")


def opened(directory: Path) -> ServedModel:
    source = open_model_source(model_options(path=str(directory), kind=kind_of_files(directory)[0].name))
    return ServedModel.open(directory, source)


def as_tei(directory: Path, case: Case) -> TeiModel | str:
    try:
        return open_as_tei(directory, case.argument)
    except TeiError as error:
        return str(error)


@pytest.mark.parametrize("name", CASES)
def test_text_embeddings_inference_starts_as_the_table_says(tmp_path, name):
    case = CASES[name]
    model = exported(tmp_path, case)
    result = as_tei(tmp_path / "out", case)
    deviations = SERVING_ENGINES["text_embeddings_inference"].deviations(model)
    assert isinstance(result, str) == any(deviation.effect is Severity.refused for deviation in deviations), (
        result,
        deviations,
    )
    reasons = [deviation.reason for deviation in deviations if deviation.effect is not Severity.rounded]
    assert len(reasons) == len(case.deviations), reasons
    assert all(part in reason for part, reason in zip(case.deviations, reasons, strict=True)), reasons
    if isinstance(result, str):
        assert case.served in result
        return
    assert result.pooling == case.served
    assert result.task == ("reranker" if model.source.kind.name == "cross_encoder" else "embedding")
    assert result.max_length == 48
    assert result.prompts == ({"query": "", "document": ""} | model.source.prompts if result.prompts else {})
    assert len(result.dense) == len(model.source.vectors.dense)
    is_encoder = case.architecture in ("bert", "xlm-roberta", "modernbert")
    assert result.is_bidirectional is (is_encoder or "bidirectional" in (case.options or {}))


def with_traits(**changes: Any) -> ServedModel:
    source = open_model_source(small_model("qwen3"))
    source = replace(source, prompts=changes.pop("prompts", source.prompts))
    source = replace(source, vectors=replace(source.vectors, **changes))
    return ServedModel(source, {"model_type": "qwen3"}, has_graph=True)


HEAD = DenseSource(directory=Path("2_Dense"), num_in=32, num_out=32, bias=True, activation=TANH)
TRUNCATED = {"truncate_dim": 16}


@pytest.mark.parametrize(
    ("changes", "trait", "lossless"),
    [
        (
            {"dense": (HEAD,)},
            "dense",
            {"sentence_transformers", "fastembed", "text_embeddings_inference", "vllm", "infinity_emb", "chromadb"},
        ),
        (TRUNCATED, "truncation", {"sentence_transformers", "fastembed", "langchain_huggingface", "chromadb"}),
        (
            {"include_prompt": False, "prompts": {"query": "q: "}},
            "include_prompt",
            {"sentence_transformers", "langchain_huggingface", "txtai"},
        ),
        ({"normalize": False}, "vector_length", {"text_embeddings_inference", "vllm", "FlagEmbedding"}),
    ],
)
def test_engines_lose_what_the_table_says(changes, trait, lossless):
    model = with_traits(**changes)
    assert trait in model.traits
    exact = {name for name, engine in SERVING_ENGINES.items() if not engine.deviations(model)}
    assert lossless <= exact
    losing = {name for name, engine in SERVING_ENGINES.items() if trait in engine.lost}
    assert not losing & exact
    assert losing


def test_every_engine_that_is_verified_has_facts():
    assert set(VERIFIED) <= SERVING_ENGINES.keys()
    for engine in SERVING_ENGINES.values():
        assert engine.kinds
        assert engine.lost <= with_traits().facts.keys()
    static = open_model_source(small_model("static_embedding"))
    served = {
        name for name, each in SERVING_ENGINES.items() if not each.deviations(ServedModel(static, {}, has_graph=False))
    }
    others = {"langchain_huggingface", "llama_index", "haystack", "chromadb", "txtai"}
    assert served == {"sentence_transformers"} | others


def test_rules_name_facts_and_kinds_that_models_have():
    """A misspelled fact would be an error only for the models that the rule is about."""
    known = {kind.name: set(with_traits().facts) for kind in kinds()}
    known["sparse"] |= {"has_static_queries", "has_other_words"}
    known["late_interaction"] |= {"is_of_colpali_engine"}
    known["vision_language"], known["vision_reranker"] = known["dense"], known["cross_encoder"]  # of which they are one
    known |= dict.fromkeys(("pages_of_transformers", "pages_of_colpali_engine"), known["late_interaction"])

    def conditions(rules: Any) -> Iterator[dict[str, Any]]:
        for rule in rules:
            if isinstance(rule, list):
                yield from conditions(rule)
            elif not isinstance(rule, str):
                yield rule.get("when", {})

    for engine in SERVING_ENGINES.values():
        assert set(engine.kinds) <= set(known)
        for condition in conditions([*engine.rules, *engine.start]):
            named = condition.get("kind", [])
            named = named.get("not", []) if isinstance(named, dict) else [named] if isinstance(named, str) else named
            assert set(named) <= set(known)
            assert condition.keys() <= known[named[0] if named else "dense"], condition


def test_the_image_for_cpus_runs_the_graph_if_there_is_one():
    engine = SERVING_ENGINES["text_embeddings_inference_cpu"]
    with_graph, model = with_traits(**TRUNCATED), with_traits(**TRUNCATED)
    model = replace(model, has_graph=False)
    assert engine.deviations(with_graph) == []
    assert [deviation.effect for deviation in engine.deviations(model)] == [Severity.changed]


def test_the_model_card_and_the_console_say_what_engines_change(tmp_path):
    save_small(small_model("bert"), tmp_path / "model")
    built = architecture_of(
        tmp_path / "architecture",
        model_options(
            path=str(tmp_path / "model"), pooling=Pooling.mean, heads=[HeadConfig(out=24)], query_prompt="alpha "
        ),
    )
    result = export_model(tmp_path / "out", built, check=False, truncate_dim=16)
    (heads,) = (note for note in result.notes if "leaves out dense heads" in note)
    assert heads.startswith("other numbers with transformers")
    assert "infinity" not in heads
    card = (tmp_path / "out" / "README.md").read_text()
    rows = {line.split(" (")[0]: line for line in card.splitlines() if line.startswith("| ")}
    assert "| exactly |" in rows["| sentence-transformers"]
    assert "| **other numbers** | it returns all dimensions" in rows["| vLLM"]
    assert "| no | it reads onnx/model.onnx, which is missing" in rows["| onnxruntime"]
    assert "vllm serve" not in card
    assert 'HuggingFaceEmbedding("path/of/this/directory", query_instruction="alpha "' in card


@pytest.mark.parametrize(
    ("architecture", "changes", "engine", "parts"),
    [
        ("bert", {}, "vllm", ["--convert embed", """'{"pooling_type": "MEAN", "use_activation": true}'"""]),
        ("bert", {}, "text_embeddings_inference", ["cuda-1.9 --model-id me/model --dtype float32"]),
        ("llama", {"bidirectional": True}, "llama_cpp", ["--pooling last", "--attention non-causal"]),
        ("qwen3", {"query_prompt": "Query: "}, "FlagEmbedding", ["FlagLLMModel(", '="Query: "', '="{}{}"']),
    ],
)
def test_commands_of_engines(architecture, changes, engine, parts):
    source = open_model_source(small_model(architecture, **changes))
    section = serving_section(ServedModel(source, {"model_type": architecture}, has_graph=False), "me/model")
    start = section.partition(f"# {SERVING_ENGINES[engine].title}\n")[2].partition("\n")[0]
    assert all(part in start for part in parts), start


def test_vllm_accepts_requests_for_the_trained_dimensions(tmp_path):
    save_small(small_model("bert"), tmp_path / "model")
    built = architecture_of(
        tmp_path / "architecture", model_options(path=str(tmp_path / "model"), pooling=Pooling.mean)
    )
    create_model_directory(
        tmp_path / "out", built.directory, WeightPlan({}, {}), torch.float32, matryoshka_dims={32, 8, 16}
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["is_matryoshka"] is True
    assert config["matryoshka_dimensions"] == [8, 16, 32]


def test_the_page_on_serving_has_the_facts_of_the_table():
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = {}
    for line in text.partition("## What each engine keeps")[2].partition("##")[0].splitlines():
        first, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
        rows[re.sub(r"\[(.*)\]\([^)]*\)", r"\1", first).partition(" (")[0]] = cells
    traits = ("dense", "truncation", "include_prompt", "is_causal", "vector_length")
    kinds = ("cross_encoder", "sparse", "late_interaction")
    for engine in SERVING_ENGINES.values():
        cells = rows[engine.title]
        for trait, cell in zip(traits, cells, strict=False):
            assert cell == "no" or trait not in engine.lost, (engine.title, trait)
        assert cells[-1] == engine.prompts
        assert [cell == "yes" for cell in cells[len(traits) : -1]] == [kind in engine.kinds for kind in kinds]


def test_the_configuration_of_triton_has_the_names_and_shapes_of_a_graph(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    exported(tmp_path, Case("xlm-roberta", "mean"), formats=["onnx"])
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "onnx" / "model.onnx"))
    page = (ROOT / "docs" / "serving" / "triton.md").read_text(encoding="utf-8")
    actual = re.findall(r'{ name: "(\w+)" data_type: TYPE_(\w+) dims: \[ (-?\d+) \] }', page)
    types = {"tensor(int64)": "INT64", "tensor(float)": "FP32"}
    sizes = {"sentence_embedding": ["768"]}  # of the page; 32 here
    nodes = {node.name: node for node in [*session.get_inputs(), *session.get_outputs()]}
    assert {node.name for node in session.get_inputs()} == {"input_ids", "attention_mask"}
    for name, type_name, size in actual:
        node = nodes[name]
        assert types[node.type] == type_name
        assert isinstance(node.shape[0], str), "the batch is dynamic"
        shown = ["-1" if isinstance(dim, str) else str(dim) for dim in node.shape[1:]]
        assert [size] == (sizes.get(name) or shown)
        assert name not in sizes or shown == ["32"]
    assert [name for name, _, _ in actual] == ["input_ids", "attention_mask", "sentence_embedding"]
