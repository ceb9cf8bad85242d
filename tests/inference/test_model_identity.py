"""The identity of stored vectors changes with what changes them, and with nothing else."""

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from embedtrain import evaluate, mine
from embedtrain.config.code import register_code
from embedtrain.config.recipe import LoraConfig, ModelConfig, Pooling, Precision
from embedtrain.distributed.world import World
from embedtrain.errors import EmbedtrainError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.weights import weights_digest
from embedtrain.inference.loading.command_model import open_encoder_source
from embedtrain.inference.vector_cache import model_identity
from tests.extending.test_pooling import POOLING, AttentionPooling
from tests.small import (
    WORDS,
    add_own_pooling,
    model_options,
    save_adapter,
    save_guide,
    save_language_model,
    small_model,
    text,
)

CORPUS = {f"d{i}": text(i, 2 + i % 9) for i in range(30)}
QUERIES = {f"q{i}": f"{WORDS[i]} a" for i in range(10)}
SETS = {"name": "set", "queries": QUERIES, "corpus": CORPUS, "relevant_docs": {f"q{i}": {f"d{i}"} for i in range(10)}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_guide(small_model("bert"), tmp_path_factory.mktemp("identity"))


def identities(world: World, models: list[ModelConfig]) -> list[dict[str, Any]]:
    register_code(AttentionPooling)
    return [model_identity(open_model_source(model), Precision.fp32, world) for model in models]


def changed_weight(path: Path) -> None:
    """Another value in the middle of the file, whose size and time stay."""
    status, tensors = path.stat(), load_file(path)
    name = sorted(tensors)[len(tensors) // 2]
    tensors[name] = np.nextafter(tensors[name], np.float32(9))
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_files_that_change_the_vectors(ranks, model, tmp_path):
    def touched(name: str) -> Any:
        return lambda directory: (directory / name).write_bytes(b"1")

    changes = {
        "copy": lambda directory: None,
        "README.md": touched("README.md"),
        "trainer_state.json": touched("trainer_state.json"),
        "weights": lambda directory: changed_weight(directory / "model.safetensors"),
        "sparse_linear.pt": touched("sparse_linear.pt"),
        "modeling.py": touched("modeling.py"),
        "a module below": lambda directory: (
            (directory / "parts").mkdir(),
            (directory / "parts" / "own.py").write_text(""),
        ),
    }
    directories = []
    for name, change in changes.items():
        directories.append(shutil.copytree(model, tmp_path / name / "model"))
        change(directories[-1])
    models = [model_options(path=str(directory), trust_remote_code=True) for directory in (model, *directories)]
    results = ranks(2, identities, models)
    assert results[0] == results[1], "the same on every rank"
    first, *others = results[0]
    unchanged = {name for name, identity in zip(changes, others, strict=True) if identity == first}
    assert unchanged == {"copy", "README.md", "trainer_state.json"}
    options = [
        model_options(path=str(model), **option) for option in ({}, {"normalize": False}, {"pooling": Pooling.cls})
    ]
    assert len({str(identity) for identity in ranks(1, identities, options)[0]}) == 3


def test_weights_of_modules_change_the_vectors(ranks, model, tmp_path):
    """Those of a user's pooling, and of the queries of a sparse model."""
    first = add_own_pooling(shutil.copytree(model, tmp_path / "first"), POOLING)
    second = shutil.copytree(first, tmp_path / "second")
    changed_weight(second / "1_Pooling/model.safetensors")
    models = [model_options(path=str(path), pooling=POOLING) for path in (first, second)]
    digests = [weights_digest(open_model_source(options)) for options in models]
    assert digests[0] != digests[1]

    language_model, weights = save_language_model(small_model("bert", kind="sparse"), tmp_path / "sparse"), []
    for value in (1.0, 2.0):
        weights.append(tmp_path / f"{value}.safetensors")
        save_file({"weight": np.full(3, value, dtype=np.float32)}, weights[-1])
    models += [
        model_options("sparse", path=str(language_model), queries="static", query_weights=str(path)) for path in weights
    ]
    pooled, other_pooled, words, other_words = ranks(1, identities, models)[0]
    assert pooled != other_pooled and words != other_words


def edited(world: World, model: Path, module: Path) -> list[dict[str, Any]]:
    """Identities of a model with a user's pooling before and after its code is edited."""
    sys.path.append(str(module.parent))
    register_code(importlib.import_module(module.stem).First)
    options = model_options(path=str(model), pooling=f"{module.stem}:First")
    before = model_identity(open_model_source(options), Precision.fp32, world)
    module.write_text(f"{module.read_text()}# edited\n")
    return [before, model_identity(open_model_source(options), Precision.fp32, world)]


def test_code_of_the_user_changes_the_vectors(ranks, model, tmp_path):
    module = tmp_path / "edited_pooling.py"
    module.write_text(
        "from torch import nn\n\n\nclass First(nn.Module):\n    def __init__(self, size):\n"
        "        super().__init__()\n\n    def forward(self, hidden, tokens):\n        return tokens.first(hidden)\n"
    )
    before, after = ranks(1, edited, model, module)[0]
    assert before["files"].pop("code/pooling") != after["files"].pop("code/pooling")
    assert before == after
    ((plain,),) = ranks(1, identities, [model_options(path=str(model))])
    assert before["files"] == plain["files"], "those of the package have no file"


def adapted(world: World, model: Path, adapters: list[Path | None]) -> list[dict[str, Any]]:
    configs = [model_options(path=str(model), lora=LoraConfig(path=adapter and str(adapter))) for adapter in adapters]
    return [model_identity(open_encoder_source(config)[1], Precision.fp32, world) for config in configs]


def test_adapters_count_by_their_content(ranks, model, tmp_path):
    first, second = (save_adapter(model, tmp_path / str(seed), seed) for seed in (1, 2))
    copy = shutil.copytree(first, tmp_path / "copy")
    none, one, other, same = ranks(1, adapted, model, [None, first, second, copy])[0]
    assert one == same and none != one != other != none


def test_evaluation_and_mining_do_not_serve_vectors_of_another_adapter(model, tmp_path):
    """The same path with another adapter in it, another path, and none."""
    common: dict[str, Any] = {"precision": "fp32", "metrics": ["ndcg@10", "mrr@10", "map"], "quiet": True}
    adapter, results = tmp_path / "adapter", []
    rows = [{"query": query, "positive": CORPUS[f"d{i}"]} for i, query in enumerate(QUERIES.values())]
    for seed in (1, 2, None):
        options = common | ({} if seed is None else {"adapter": str(save_adapter(model, adapter, seed))})
        stored = evaluate(model, SETS, output_dir=tmp_path / "a", vectors_dir=str(tmp_path / "vectors"), **options)
        fresh = evaluate(model, SETS, output_dir=tmp_path / "b", **options)
        assert stored == fresh
        results.append(fresh["set"]["map"])
        mining: dict[str, Any] = {"negatives": 2, "relative_margin": None, "precision": "fp32", "quiet": True}
        mining |= {"adapter": options.get("adapter")}
        if seed == 1:
            mine(model, rows, tmp_path / "mined", **mining)
            mine(model, rows, tmp_path / "mined", **mining)
        else:
            with pytest.raises(EmbedtrainError, match=r"other options|model"):
                mine(model, rows, tmp_path / "mined", **mining)
    assert len(set(results)) == 3, "the adapters have an effect"
