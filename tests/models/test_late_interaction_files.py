"""Directories of late-interaction models give the vectors that sentence-transformers computes, or are rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder

from embedtrain.config.kind_settings import QueryExpansion, TokenSimilarity
from embedtrain.data.types import TextRole
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.source import open_model_source
from tests.late_interaction_models import (
    PUNCTUATION,
    TEXTS,
    multi_vector_model,
    save_backbone,
    save_pylate,
    save_stanford,
    token_vectors,
)
from tests.small import model_options

ARCHITECTURES = ["bert", "xlm-roberta", "modernbert"]
EXPANSIONS: list[dict[str, Any] | None] = [
    None,
    {"strategy": "min", "length": 12, "attend": False},
    {"strategy": "fixed", "length": 12, "attend": False},
    {"strategy": "fixed", "length": 8, "attend": True, "token": "</s>"},
]


def assert_equal_vectors(directory: Path, model: Any = None) -> None:
    model = MultiVectorEncoder(str(directory), device="cpu") if model is None else model
    for role, encode in ((TextRole.query, model.encode_query), (TextRole.document, model.encode_document)):
        ours, theirs = token_vectors(directory, role), encode(TEXTS, show_progress_bar=False)
        for text, own, other in zip(TEXTS, ours, theirs, strict=True):
            if len(other):  # we keep the vector of the first token
                torch.testing.assert_close(own, torch.as_tensor(other), rtol=0, atol=1e-5, msg=f"{role}: {text}")


def opened(directory: Path, kind: str = "late_interaction", **options: Any) -> Any:
    return open_model_source(model_options(path=str(directory), kind=kind, **options))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def st_dir(tmp_path: Path) -> Path:
    backbone = save_backbone(tmp_path / "backbone", "bert")
    expansion = {"strategy": "fixed", "length": 12, "attend": False}
    model = multi_vector_model(backbone, skip=PUNCTUATION, document_length=20, query_expansion=expansion)
    model.save_pretrained(str(tmp_path / "st"))
    return tmp_path / "st"


@pytest.mark.quick("bert", "modernbert")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sentence_transformers_directories(architecture, tmp_path):
    backbone = save_backbone(tmp_path / "backbone", architecture)
    prompts = {"query": "alpha b ", "document": ""}
    for index, expansion in enumerate(EXPANSIONS):
        lengths = {"query_length": None if expansion else 10, "document_length": 20 if index else None}
        skip = PUNCTUATION if index % 2 else None
        model = multi_vector_model(backbone, skip=skip, prompts=prompts, query_expansion=expansion, **lengths)
        model.save_pretrained(str(tmp_path / str(index)))
        assert_equal_vectors(tmp_path / str(index), model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("settings", [{}, {"attend_to_expansion_tokens": True}, {"do_query_expansion": False}])
def test_pylate_directories(architecture, settings, tmp_path):
    assert_equal_vectors(save_pylate(tmp_path / "model", architecture, **settings))


def test_prefixes_of_pylate_are_tokens_and_its_prompts_follow_them(tmp_path):
    directory = save_pylate(tmp_path / "model", "bert", prompts={"query": "mu ", "document": "[D] nu "})
    assert opened(directory).prompts == {"query": "[Q] mu ", "document": "[D] nu "}
    assert_equal_vectors(directory)


@pytest.mark.parametrize("settings", [{}, {"attend_to_mask_tokens": True, "mask_punctuation": False}])
def test_directories_of_stanford(settings, tmp_path):
    directory = save_stanford(tmp_path / "model", **settings)
    assert_equal_vectors(directory)
    (directory / "artifact.metadata").unlink()
    source = opened(directory)
    assert source.prompts == {"query": "[unused0] ", "document": "[unused1] "}
    assert source.settings.expansion.length == 32


def test_options_replace_settings_of_the_files(st_dir):
    options = {"document_length": 9, "query_expansion": QueryExpansion.min, "expansion_length": 5}
    options |= {"attend_to_expansion_tokens": True, "skiplist_words": ["a"], "similarity": TokenSimilarity.meanmaxsim}
    model = model_options(path=str(st_dir), kind="late_interaction")
    for name, value in options.items():
        setattr(model, name, value)
    settings = open_model_source(model).settings
    assert (settings.document_length, settings.skiplist_words, settings.similarity.value) == (9, ("a",), "meanmaxsim")
    assert (settings.expansion.length, settings.expansion.attend, settings.expansion.strategy.value) == (5, True, "min")


@pytest.mark.parametrize(
    ("name", "value"),
    [("dimension", 8), ("query_length", 20), ("query_length", 5), ("expansion_token", "a")],
)
def test_options_that_contradict_the_files(name, value, st_dir):
    model = model_options(path=str(st_dir), kind="late_interaction")
    setattr(model, name, value)
    if name == "expansion_token":
        model.query_expansion = QueryExpansion.none
    with pytest.raises(ConfigError, match=f"model.{name}={value}"):
        open_model_source(model)


def test_kinds_of_models_are_not_confused(st_dir, tmp_path):
    for kind in ("dense", "cross_encoder"):
        with pytest.raises(ConfigError, match=rf"model.kind={kind}.*set model.kind=late_interaction"):
            opened(st_dir, kind)
    with pytest.raises(ConfigError, match="PyLate"):
        opened(save_pylate(tmp_path / "pylate", "bert"), "dense")
    with pytest.raises(ConfigError, match="Stanford"):
        opened(save_stanford(tmp_path / "stanford"), "dense")


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [5]}),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["query"]}),
        ("2_MultiVectorMask/config.json", {"skiplist_words": [1]}),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}),
        ("1_Dense/config.json", {"use_residual": True}),
        ("1_Dense/config.json", {"module_output_name": "other"}),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "max", "length": 4}}),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min", "length": 0}}),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min", "length": 4, "pad": 1}}),
        ("sentence_bert_config.json", {"document_length": "many"}),
        ("config_sentence_transformers.json", {"similarity_fn_name": "xtr"}),
    ],
)
def test_settings_that_are_not_supported(file, values, st_dir):
    change(st_dir / file, **values)
    name = next(iter(values))
    with pytest.raises(ModelError, match=rf"(?s){file.split('/')[-1]}.*{name}") as caught:
        opened(st_dir)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kinds",
    [
        ["Transformer", "MultiVectorMask", "Normalize"],
        ["Transformer", "Dense", "MultiVectorMask"],
        ["Transformer", "Pooling", "Dense", "MultiVectorMask", "Normalize"],
        ["Transformer", "Dense", "MultiVectorMask", "Normalize", "HierarchicalTokenPooling"],
    ],
)
def test_modules_that_are_not_supported(kinds, st_dir):
    modules = {m["type"].rsplit(".", 1)[1]: m for m in json.loads((st_dir / "modules.json").read_text())}
    unknown = {"type": "sentence_transformers.multi_vector_encoder.modules.{}", "path": ""}
    content = [modules.get(kind, unknown | {"type": unknown["type"].format(kind)}) for kind in kinds]
    (st_dir / "modules.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=", ".join(kinds)):
        opened(st_dir)


def test_prefix_that_is_no_token_is_text(tmp_path):
    directory = save_pylate(tmp_path / "model", "bert", query_prefix="alpha b ", document_prefix="")
    assert opened(directory).prompts == {"query": "alpha b ", "document": ""}
    assert_equal_vectors(directory)


@pytest.mark.parametrize("shape", [(16,), (16, 31)])
def test_projection_of_stanford_is_checked(shape, tmp_path):
    directory = save_stanford(tmp_path / "model")
    weights = load_file(directory / "model.safetensors") | {"linear.weight": torch.ones(shape)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"linear\.weight"):
        opened(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"linear\.weight.*pickle"):
        opened(directory)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("[1]", "dict"),
        ('{"query_maxlen": 1e9}', "query_maxlen"),
        ('{"doc_maxlen": 0}', "doc_maxlen"),
        ('{"query_token_id": 5}', "5"),
        ('{"similarity": "l2"}', "l2"),
        (json.dumps({"name": "x" * (1 << 20)}), "bytes"),
        ("[" * 100_000, "artifact.metadata"),
    ],
    ids=["list", "length", "zero", "token", "similarity", "large", "deep"],
)
def test_metadata_of_stanford_is_checked(content, word, tmp_path):
    directory = save_stanford(tmp_path / "model")
    (directory / "artifact.metadata").write_text(content)
    with pytest.raises(ModelError, match=word):
        opened(directory)
