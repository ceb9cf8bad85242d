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

from embedtrain.config.compose import compose_recipes
from embedtrain.data.types import Chunk
from embedtrain.distributed.world import World
from embedtrain.formats.verify import PROBES
from embedtrain.training import train
from tests.custom_code import model_with_remote_code, unload_remote_code
from tests.runs import BASE, evaluation_metrics, exported_weights, losses, rewind_run
from tests.small import ARCHITECTURES, MORE_ARCHITECTURES, POOLINGS, save_small, small_model, write_beir, write_rows

# Rotary positions of Llama 3, which scale low frequencies.
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}


@dataclass(frozen=True)
class Case:
    """A model and the options of its run.

    Attributes:
        save: saves the model in a folder; returns its directory.
        options: of the run.
    """

    save: Callable[[Path], Path]
    options: tuple[str, ...]


def small_case(architecture: str, *options: str, **changes: Any) -> Case:
    """A small random model of an architecture in transformers."""
    model = small_model(architecture)
    pooling = POOLINGS[architecture].value if architecture in POOLINGS else "mean"
    return Case(
        lambda folder: save_small(small_model(architecture, config=model.config | changes), folder / "model"),
        (f"model.pooling={pooling}", "model.query_prompt='beta '", *options),
    )


def embedding_gemma(folder: Path) -> Path:
    """Like EmbeddingGemma: bidirectional attention, two dense heads without bias or activation, two prompts."""
    layers = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    plain = small_case("gemma3_text", use_bidirectional_attention=True, **layers).save(folder)
    torch.manual_seed(0)
    heads = [parts.Dense(a, b, bias=False, activation_function=torch.nn.Identity()) for a, b in ((32, 80), (80, 32))]
    modules = [parts.Transformer(str(plain)), parts.Pooling(32, pooling_mode="mean"), *heads, parts.Normalize()]
    SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save(str(folder / "whole"))
    return folder / "whole"


CASES = {name: small_case(name) for name in ARCHITECTURES | MORE_ARCHITECTURES} | {
    "bert": small_case("bert", "parallel.strategy=ddp"),  # with a pooler, which has no gradient
    "llama": small_case("llama", rope_parameters=LLAMA_3),
    "mistral": small_case("mistral", sliding_window=4),  # shorter than most texts
    "distilbert": small_case("distilbert", sinusoidal_pos_embds=True),  # initialised as sines, then trained
    "mpnet": small_case("mpnet", "parallel.activation_checkpointing=true"),  # without support for it in transformers
    "embedding_gemma": Case(embedding_gemma, ("model.pooling=null",)),
    "own_code": Case(
        # A unique folder name: transformers caches custom code by the name of its folder.
        lambda folder: model_with_remote_code(folder / "pairing"),
        ("model.pooling=mean", "model.trust_remote_code=true", "parallel.activation_checkpointing=true"),
    ),
}


def run(world: World, arguments: list[str]) -> tuple[str, np.ndarray, np.ndarray]:
    """Standard output, and embeddings of the probes by the trained encoder and by sentence-transformers."""
    unload_remote_code()
    (recipe,) = compose_recipes([*BASE, *arguments])
    embeddings: list[np.ndarray] = []
    export_run = train.export_run

    def export_and_encode(started: Any, model: Any, *rest: Any) -> Any:
        exported = export_run(started, model, *rest)
        trusted = recipe.model.trust_remote_code
        opened = SentenceTransformer(str(exported.directory), device="cpu", trust_remote_code=trusted)
        texts = [opened.prompts["document"] + probe for probe in PROBES]
        tokens = opened.tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            embeddings.append(model.encoder.eval()(Chunk(tokens["input_ids"], tokens["attention_mask"]))[0].numpy())
        embeddings.append(opened.encode_document(list(PROBES)))
        return exported

    train.export_run = export_and_encode
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            train.train(recipe, world)
    finally:
        train.export_run = export_run
    live, exported = embeddings
    return output.getvalue(), live, exported


# Architectures that are covered by tests/test_run.py or by a similar one here.
COVERED = (
    *("xlm-roberta", "bert", "distilbert", "electra", "llama", "qwen2", "mistral", "gemma3_text"),
    *("mpnet", "deberta-v2", "gemma"),
)


@pytest.mark.quick("qwen3", "own_code")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in COVERED else name for name in CASES]
)
def test_train_resume_and_export(ranks, tmp_path, name):
    """Four steps with an evaluation and a checkpoint after two; then the last two again from that checkpoint."""
    model = CASES[name].save(tmp_path)
    rows, dev = write_rows(tmp_path / "train.jsonl", 30), write_beir(tmp_path / "dev", 12)
    arguments = [
        *CASES[name].options, f"model.path={model}", f"data.train=[{rows}]", f"evaluation.sets=[{dev}]",
        "train.steps=4", "evaluation.every=2", "checkpoint.every=2", "checkpoint.keep=9",
    ]  # fmt: skip
    whole, resumed = tmp_path / "run", tmp_path / "resumed"
    (output, live, exported), _ = ranks(2, run, [*arguments, f"output_dir={whole}"])
    (layers,) = (line for line in output.splitlines() if "+ root" in line)
    assert ", 2 " in layers, "both layers are FSDP groups"
    assert np.abs(live - exported).max() < 1e-5
    assert np.abs(exported - exported[0]).max() > 0.1, "embeddings differ"

    rewind_run(whole, resumed, 2)
    (output, live, exported), _ = ranks(2, run, [*arguments, f"output_dir={resumed}", "export.check=true"])
    assert "resuming from" in output
    assert losses(resumed) == losses(whole)
    assert list(losses(resumed)) == [1, 2, 3, 4]
    assert evaluation_metrics(resumed) == evaluation_metrics(whole)
    assert list(evaluation_metrics(resumed)) == [2, 4]
    assert np.abs(live - exported).max() < 1e-5
    assert exported_weights(resumed) == exported_weights(whole)
    check_export(model, resumed / "model", trusted=name == "own_code")


def check_export(model: Path, exported: Path, *, trusted: bool) -> None:
    """All weights have their names, all used weights have changed, and transformers finds all of them."""
    before, after = load_file(model / "model.safetensors"), load_file(exported / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name for name in after if "pooler" not in name and "bias" not in name} <= changed
    assert not {name for name in changed if "pooler" in name}
    _, report = AutoModel.from_pretrained(exported, output_loading_info=True, trust_remote_code=trusted)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    model_st = SentenceTransformer(str(exported), device="cpu", trust_remote_code=trusted)
    if model_st.prompts.get("query"):
        with_prompt = model_st.encode([model_st.prompts["query"] + "alpha gamma"], prompt="")
        assert np.allclose(model_st.encode_query(["alpha gamma"]), with_prompt, atol=1e-6)
        assert not np.allclose(model_st.encode(["alpha gamma"], prompt=""), with_prompt, atol=1e-3)
    heads = sorted(exported.glob("*_Dense/model.safetensors"))
    assert len(heads) == len(sorted(model.glob("*_Dense/model.safetensors")))
    for head in heads:
        head_before = load_file(model / head.relative_to(exported))
        assert all(not torch.equal(tensor, head_before[key]) for key, tensor in load_file(head).items())
