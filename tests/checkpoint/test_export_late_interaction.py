"""Exports of late-interaction models, which sentence-transformers and PyLate open with the same vectors."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder

from embedtrain.config.kind_settings import QueryExpansion, TokenSimilarity
from embedtrain.data.types import TextRole
from embedtrain.errors import CheckpointError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from tests.checkpoint.exporting import Architecture, architecture_of, export_model
from tests.late_interaction_models import (
    TEXTS,
    save_backbone,
    save_pylate,
    save_stanford,
    token_vectors,
)
from tests.small import model_options

MIN = {"query_expansion": QueryExpansion.min, "expansion_length": 10, "query_length": 20}
MEAN = {"similarity": TokenSimilarity.meanmaxsim, "query_expansion": QueryExpansion.none}


def architecture(directory: Path, model: Path, **options: Any) -> Architecture:
    return architecture_of(directory, model_options(path=str(model), kind="late_interaction", **options))


def settings_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config_sentence_transformers.json").read_text())


@pytest.mark.parametrize(
    ("save", "options", "kind"),
    [
        (lambda path: save_pylate(path, "xlm-roberta"), {}, "ColBERT"),
        (lambda path: save_pylate(path, "bert"), MIN, "MultiVectorEncoder"),
        (save_stanford, MEAN, "ColBERT"),
        (lambda path: save_backbone(path, "modernbert"), {"dimension": 8}, "ColBERT"),
    ],
    ids=["pylate", "min", "stanford", "new"],
)
def test_an_export_gives_the_same_vectors_and_settings(save, options, kind, tmp_path):
    built = architecture(tmp_path / "architecture", save(tmp_path / "model"), **options)
    result = export_model(tmp_path / "export", built, formats=["sentence_transformers", "onnx"])
    assert result.difference < 1e-5, "the export is compared with sentence-transformers"
    assert settings_of(result.directory)["model_type"] == kind
    theirs = MultiVectorEncoder(str(result.directory), device="cpu")
    assert theirs.similarity_fn_name == built.source.settings.similarity.value
    for role, encode in ((TextRole.query, theirs.encode_query), (TextRole.document, theirs.encode_document)):
        for own, other in zip(token_vectors(result.directory, role), encode(TEXTS), strict=True):
            torch.testing.assert_close(own, torch.as_tensor(other), rtol=0, atol=1e-5)
    assert not [path.name for path in result.directory.rglob("*") if path.suffix in (".bin", ".pt")]


@pytest.mark.parametrize(
    ("prompts", "prefixes", "names"),
    [
        ({"query": "[Q] ", "document": "[D] "}, ("[Q] ", "[D] "), ("", "")),
        ({"query": "[Q] mu ", "document": ""}, ("[Q] ", ""), ("mu ", "")),
        ({"query": "mu nu ", "document": "alpha"}, ("", ""), ("mu nu ", "alpha")),
    ],
)
def test_prompts_are_prefixes_of_pylate_if_they_are_tokens(prompts, prefixes, names, tmp_path):
    options = {f"{role}_prompt": prompt for role, prompt in prompts.items()}
    built = architecture(tmp_path / "architecture", save_pylate(tmp_path / "model", "bert"), **options)
    settings = settings_of(built.directory)
    assert (settings["query_prefix"], settings["document_prefix"]) == prefixes
    assert (settings["prompts"]["query"], settings["prompts"]["document"]) == names
    reopened = open_model_source(model_options(path=str(built.directory), kind="late_interaction"))
    assert {role: reopened.prompts[role] for role in prompts} == prompts
    # PyLate inserts the prefix after the first token of a text.
    tokenizer = load_tokenizer(reopened)
    for prompt, prefix, rest in zip(prompts.values(), prefixes, names, strict=True):
        first, *others = tokenizer(f"{rest}beta gamma")["input_ids"]
        inserted = [tokenizer.convert_tokens_to_ids(prefix)] if prefix else []
        assert tokenizer(f"{prompt}beta gamma")["input_ids"] == [first, *inserted, *others]


def test_words_that_are_no_tokens_are_left_out_of_the_skip_list(tmp_path):
    """PyLate takes their ids for that of the unknown token, whose vectors it would leave out."""
    built = architecture(tmp_path / "architecture", save_pylate(tmp_path / "model", "bert"))
    assert "!" in built.source.settings.skiplist_words
    assert settings_of(built.directory)["skiplist_words"] == [",", "."]


def test_an_export_with_other_vectors_fails(tmp_path):
    built = architecture(tmp_path / "architecture", save_pylate(tmp_path / "model", "bert"))
    for change in ({"document_length": 7}, {"do_query_expansion": False}, {"query_prefix": ""}, {"skiplist_words": []}):
        changed = replace(built, directory=Path(shutil.copytree(built.directory, tmp_path / f"{len(change)}-{change}")))
        path = changed.directory / "config_sentence_transformers.json"
        path.write_text(json.dumps(settings_of(built.directory) | change))
        with pytest.raises(CheckpointError, match="differ"):
            export_model(tmp_path / "export", changed)
        assert not (tmp_path / "export").exists()
        shutil.rmtree(changed.directory)
