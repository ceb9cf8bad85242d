"""Every architecture from a directory to a directory: trained, evaluated, saved, resumed and exported on two ranks."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as parts
from transformers import AutoModel

import embedtrain.training.train
from embedtrain.checkpoint.export.verify import PROBES
from embedtrain.config.compose import compose_recipes
from embedtrain.distributed.world import World
from tests.custom_code import model_with_remote_code, unload_remote_code
from tests.small import ARCHITECTURES, MORE_ARCHITECTURES, POOLINGS, save_small, small_model, write_beir, write_rows
from tests.test_run import BASE, figures, losses, rewind_run

# Llama 3's positions, of which those of low frequency are stretched.
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}


@dataclass(frozen=True)
class Case:
    """How a model's directory is made in a folder, and the options that its run has."""

    make: Callable[[Path], Path]
    options: tuple[str, ...]


def of(architecture: str, *options: str, **changes: Any) -> Case:
    """A small random model of a class of transformers'."""
    model = small_model(architecture)
    pooling = POOLINGS[architecture].value if architecture in POOLINGS else "mean"
    return Case(
        lambda folder: save_small(small_model(architecture, config=model.config | changes), folder / "model"),
        (f"model.pooling={pooling}", "model.query_prompt='beta '", *options),
    )


def embedding_gemma(folder: Path) -> Path:
    """In EmbeddingGemma's shape: all tokens see each other, two heads without bias or activation, two prompts."""
    layers = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    plain = of("gemma3_text", use_bidirectional_attention=True, **layers).make(folder)
    torch.manual_seed(0)
    heads = [parts.Dense(a, b, bias=False, activation_function=torch.nn.Identity()) for a, b in ((32, 80), (80, 32))]
    modules = [parts.Transformer(str(plain)), parts.Pooling(32, pooling_mode="mean"), *heads, parts.Normalize()]
    SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save(str(folder / "whole"))
    return folder / "whole"


CASES = {name: of(name) for name in ARCHITECTURES | MORE_ARCHITECTURES} | {
    "bert": of("bert", "parallel.strategy=ddp"),  # with a pooler, which gets no gradient
    "llama": of("llama", rope_parameters=LLAMA_3),
    "mistral": of("mistral", sliding_window=4),  # less than most texts
    "distilbert": of("distilbert", sinusoidal_pos_embds=True),  # which only begin as sines: they are trained
    "mpnet": of("mpnet", "parallel.activation_checkpointing=true"),  # which has no such switch of its own
    "embedding_gemma": Case(embedding_gemma, ("model.pooling=null",)),
    "own_code": Case(
        # A name of its own: a process keeps what code it has found under a folder's name, and other tests have theirs.
        lambda folder: model_with_remote_code(folder / "pairing"),
        ("model.pooling=mean", "model.trust_remote_code=true", "parallel.activation_checkpointing=true"),
    ),
}


def run(world: World, arguments: list[str]) -> tuple[str, np.ndarray, np.ndarray]:
    """What was said; and vectors of the probes, by the encoder as it ends training and by sentence-transformers."""
    unload_remote_code()
    (recipe,) = compose_recipes([*BASE, *arguments])
    vectors: list[np.ndarray] = []
    export = embedtrain.train.export_run

    def and_encode(recipe: Any, model: Any, *rest: Any) -> Any:
        exported = export(recipe, model, *rest)
        trusted = recipe.model.trust_remote_code
        opened = SentenceTransformer(str(exported.directory), device="cpu", trust_remote_code=trusted)
        texts = [opened.prompts["document"] + probe for probe in PROBES]
        tokens = opened.tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            vectors.append(model.encoder.eval()(tokens["input_ids"], tokens["attention_mask"]).numpy())
        vectors.append(opened.encode_document(list(PROBES)))
        return exported

    embedtrain.train.export_run = and_encode
    try:
        with contextlib.redirect_stdout(io.StringIO()) as told:
            embedtrain.train.train(recipe, world)
    finally:
        embedtrain.train.export_run = export
    live, theirs = vectors
    return told.getvalue(), live, theirs


# XLM-R goes through all of this in tests/test_run.py; the others have a twin here.
TWINS = ("xlm-roberta", "qwen2", "gemma3_text")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in TWINS else name for name in CASES]
)
def test_from_a_directory_to_a_directory(ranks, tmp_path, name):
    """Four steps with an evaluation and a checkpoint after two; then the last two again, from that checkpoint."""
    model = CASES[name].make(tmp_path)
    rows, dev = write_rows(tmp_path / "train.jsonl", 30), write_beir(tmp_path / "dev", 12)
    arguments = [
        *CASES[name].options, f"model.path={model}", f"data.train=[{rows}]", f"evaluation.sets=[{dev}]",
        "train.steps=4", "evaluation.every=2", "checkpoint.every=2", "checkpoint.keep=9",
    ]  # fmt: skip
    whole, again = tmp_path / "run", tmp_path / "again"
    (told, live, theirs), _ = ranks(2, run, [*arguments, f"output_dir={whole}"])
    (layers,) = (line for line in told.splitlines() if "+ root" in line)
    assert ", 2 " in layers, "both layers are groups of their own"
    assert np.abs(live - theirs).max() < 1e-5
    assert np.abs(theirs - theirs[0]).max() > 0.1, "texts have vectors of their own"

    rewind_run(whole, again, 2)
    (told, live, theirs), _ = ranks(2, run, [*arguments, f"output_dir={again}", "export.check=true"])
    assert "resuming from" in told
    assert losses(again) == losses(whole)
    assert list(losses(again)) == [1, 2, 3, 4]
    assert figures(again) == figures(whole)
    assert list(figures(again)) == [2, 4]
    assert np.abs(live - theirs).max() < 1e-5
    written = again / "model" / "model.safetensors"
    assert written.read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    look_at(model, again / "model", trusted=name == "own_code")


def look_at(model: Path, exported: Path, *, trusted: bool) -> None:
    """All weights are there under their names; all that is used has moved; transformers misses nothing."""
    started, ended = load_file(model / "model.safetensors"), load_file(exported / "model.safetensors")
    assert ended.keys() == started.keys()
    moved = {name for name in ended if not torch.equal(ended[name], started[name])}
    assert {name for name in ended if "pooler" not in name and "bias" not in name} <= moved
    assert not {name for name in moved if "pooler" in name}
    _, report = AutoModel.from_pretrained(exported, output_loading_info=True, trust_remote_code=trusted)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    given = SentenceTransformer(str(exported), device="cpu", trust_remote_code=trusted)
    if given.prompts.get("query"):
        with_prompt = given.encode([given.prompts["query"] + "alpha gamma"], prompt="")
        assert np.allclose(given.encode_query(["alpha gamma"]), with_prompt, atol=1e-6)
        assert not np.allclose(given.encode(["alpha gamma"], prompt=""), with_prompt, atol=1e-3)
    heads = sorted(exported.glob("*_Dense/model.safetensors"))
    assert len(heads) == len(sorted(model.glob("*_Dense/model.safetensors")))
    for head in heads:
        before = load_file(model / head.relative_to(exported))
        assert all(not torch.equal(tensor, before[key]) for key, tensor in load_file(head).items())
