"""Whole runs of vision-language models: trained on rows with and without pictures, exported, and opened again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers.base.modules import transformer
from transformers import AutoModel

from embedtrain.distributed.world import World
from embedtrain.formats.verify import probe_outputs
from embedtrain.kinds.dense import vision
from embedtrain.models.build import assemble_encoder, full_state_dict
from tests.commands import call
from tests.image_text.models import picture_item, row_value
from tests.runs import evaluation_metrics, losses, rewind_run, run_without_base
from tests.small import text
from tests.vision_language.models import save_vision_model
from tests.vision_language.test_open import opened

SETTINGS = [
    "name=t", "model.pooling=last", "train.global_batch_size=8", "train.log_every=1", "train.chunk_tokens=200",
    "train.steps=4", "optim.lr=1e-3", "loss.temperature=0.1", "parallel.precision=fp32", "parallel.strategy=fsdp",
    "parallel.compile=false", "checkpoint.every=2", "evaluation.at_start=false", "evaluation.every=2",
    "model.query_prompt=Find it.", 'data.instruction_format="{instruction}{text}"',
    "tracking.report=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Rows whose queries or documents have a text, a picture or both; one has an instruction."""
    folder = tmp_path_factory.mktemp("vision_language_runs")
    for name in ("qwen2_vl", "qwen3_vl", "modernvbert", "paligemma"):
        save_vision_model(name, folder)

    def item(number: int) -> Any:
        if number % 3 == 0:
            return text(number, 2 + number % 7)
        picture = row_value(folder, number)
        if number % 3 == 1:
            return picture
        return picture | {"text": text(number, 3)} if isinstance(picture, dict) else f"{picture}{text(number, 3)}"

    rows = [{"query": text(i, 2 + i % 5), "pos": [item(i)], "neg": [item(i + 20)]} for i in range(16)]
    rows += [{"query": item(i + 1), "pos": [text(i, 4)], "prompt": "Answer."} for i in range(16, 20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dev = [{"query": text(i, 2 + i % 7), "pos": [item(i)], "neg": [item(i + 1)]} for i in range(20, 29)]
    (folder / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dev))
    return folder


def run(world: World, inputs: Path, *arguments: str) -> None:
    """Train with the pictures of the inputs."""
    for path in inputs.glob("picture_*.png"):
        picture_item(inputs, int(path.stem.removeprefix("picture_")))
    run_without_base(world, *arguments)


def options(inputs: Path, output_dir: Path, model: str, *more: str) -> list[str]:
    return [
        *SETTINGS, f"model.path={inputs / model}", f"data.train=[{inputs / 'train.jsonl'}]",
        f"evaluation.sets=[{inputs / 'dev.jsonl'}]", f"output_dir={output_dir}", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_trained_exported_resumed_and_opened_again(ranks, inputs, tmp_path):
    """On 1 and 3 ranks; a run resumes on another number."""
    runs = {size: tmp_path / str(size) for size in (1, 3)}
    for size, output_dir in runs.items():
        ranks(size, run, inputs, *options(inputs, output_dir, "qwen3_vl"), timeout=280)
        assert losses(output_dir) == pytest.approx(losses(runs[1]), rel=1e-4)
        assert evaluation_metrics(output_dir) == evaluation_metrics(runs[1])
    resumed = rewind_run(runs[3], tmp_path / "resumed", 2)
    ranks(2, run, inputs, *options(inputs, resumed, "qwen3_vl"))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)


@pytest.mark.parametrize("architecture", ["modernvbert", pytest.param("paligemma", marks=pytest.mark.slow)])
def test_a_frozen_tower_and_the_libraries(ranks, inputs, tmp_path, architecture):
    """The run compares the vectors of transformers and sentence-transformers; the export trains further."""
    more = ["model.image.frozen=true", "train.steps=2", "checkpoint.every=2"]
    ranks(1, run, inputs, *options(inputs, tmp_path / "run", architecture, *more))
    stored = load_file(tmp_path / "run/model/model.safetensors")
    before = AutoModel.from_pretrained(inputs / architecture).state_dict()  # transformers renames weights of PaliGemma
    changed = {name for name in stored if not torch.equal(stored[name], before[name])}
    assert changed
    assert not any(name.startswith(("vision_", "connector.", "multi_modal_projector.")) for name in changed)
    settings = json.loads((tmp_path / "run/model/config_sentence_transformers.json").read_text())
    assert settings["prompts"]["query"] == "Find it."
    card = (tmp_path / "run/model/README.md").read_text()
    assert "| sentence-transformers (6.2) | exactly |" in card
    assert card.count("| exactly |") == 2
    assert "What others do with such a model is not known." in card
    assert '{"image": Image.open("page.png"), "text": "with a picture before it"}' in card
    call("export", f"run={tmp_path / 'run'}", f"output_dir={tmp_path / 'exported'}")
    torch.testing.assert_close(load_file(tmp_path / "exported/model.safetensors"), stored, rtol=0, atol=0)


@pytest.mark.slow
def test_an_export_of_qwen_is_opened_by_sentence_transformers(ranks, inputs, tmp_path, monkeypatch):
    """Adapters are those of the language model, and PEFT adds them to it; there is no processor of videos."""
    more = [
        "model.lora={rank: 2, targets: all-linear}", "train.steps=2", "checkpoint.every=2", "model.max_length=120",
        'model.item_template="<|im_start|>{prompt}<|im_end|>\\n{item}<|endoftext|>"', "model.image.max_pixels=512",
        "export.formats=[sentence_transformers,adapter]",
    ]  # fmt: skip
    ranks(2, run, inputs, *options(inputs, tmp_path / "run", "qwen2_vl", *more))
    directory = tmp_path / "run/model"
    assert (directory / "adapter/adapter_model.safetensors").is_file()
    stored, before = load_file(directory / "model.safetensors"), load_file(inputs / "qwen2_vl/model.safetensors")
    changed = {name for name in stored if not torch.equal(stored[name], before[name])}
    assert changed
    assert all("language_model." in name for name in changed)
    source, tokenizer = opened(directory)
    monkeypatch.setattr(
        transformer.AutoProcessor, "from_pretrained", lambda path, **_: vision.open_processor(Path(path), source)
    )
    theirs = source.kind.files.of_sentence_transformers(directory, source, source.prompts, 120)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, 0))
    torch.testing.assert_close(theirs, probe_outputs(encoder, source, tokenizer), atol=1e-5, rtol=0)
