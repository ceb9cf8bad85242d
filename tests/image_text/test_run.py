"""Whole runs of texts and pictures: trained, evaluated, resumed, exported, and opened by the libraries and again."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from embedtrain.config.kinds import kind_of_files
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.images.item import MARK, has_pictures
from tests.commands import call
from tests.image_text.models import row_value, save_image_text, save_parts
from tests.mine.runs import mine
from tests.runs import evaluation_metrics, losses, rewind_run, run_without_base
from tests.small import text

SETTINGS = [
    "name=t", "model.kind=image_text", "train.global_batch_size=8", "train.log_every=1", "train.chunk_tokens=64",
    "train.steps=4", "optim.lr=1e-3", "parallel.precision=fp32", "parallel.strategy=fsdp", "parallel.compile=false",
    "checkpoint.every=2", "evaluation.at_start=false", "evaluation.every=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Captions and their pictures, some with a picture as a hard negative; a set with pictures as documents."""
    folder = tmp_path_factory.mktemp("image_text")
    for name in ("clip", "siglip"):
        save_image_text(name, folder)
    save_parts(folder)

    def picture(seed: int) -> Any:
        return row_value(folder, seed)

    rows = [{"query": text(i, 2 + i % 7), "pos": [picture(i)]} for i in range(24)]
    rows += [{"query": picture(i), "pos": [text(i, 2 + i % 7)], "neg": [text(50 + i, 4)]} for i in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoded = [{"bytes": (folder / f"picture_{i}.png").read_bytes(), "path": None} for i in range(24)]
    pq.write_table(pa.table({"image": encoded, "caption": [text(i, 5) for i in range(24)]}), folder / "more.parquet")
    dev = [{"query": text(i, 2 + i % 7), "pos": [picture(i)], "neg": [picture(i + 1)]} for i in range(20, 29)]
    (folder / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dev))
    return folder


def options(inputs: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        *SETTINGS, f"data.train=[{inputs / 'train.jsonl'},{inputs / 'more.parquet'}]",
        f"evaluation.sets=[{inputs / 'dev.jsonl'}]", f"output_dir={output_dir}", *more,
    ]  # fmt: skip


def test_trained_exported_resumed_and_opened_again(ranks, inputs, tmp_path):
    """On 1, 2 and 3 ranks; a run resumes on another number, also with the average of the temperature."""
    more = [f"model.path={inputs / 'siglip'}", "loss=siglip", "optim.ema=0.5"]
    runs = {size: tmp_path / str(size) for size in (1, 3)}
    for size, output_dir in runs.items():
        ranks(size, run_without_base, *options(inputs, output_dir, *more), timeout=280)
        assert losses(output_dir) == pytest.approx(losses(runs[1]), rel=1e-4)
        assert evaluation_metrics(output_dir) == evaluation_metrics(runs[1])
    page = (runs[3] / "report.html").read_text(encoding="utf-8")
    assert MARK not in page and "[picture " in page
    images = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(set(images)) > 5
    assert max(Image.open(io.BytesIO(base64.b64decode(images[0]))).size) <= 96
    resumed = rewind_run(runs[3], tmp_path / "resumed", 2)
    ranks(2, run_without_base, *options(inputs, resumed, *more, "tracking.report=false"))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)
    stored, start = load_file(runs[1] / "model" / "model.safetensors"), load_file(inputs / "siglip/model.safetensors")
    again = load_file(resumed / "model" / "model.safetensors")
    for name in ("logit_scale", "logit_bias"):
        assert stored[name].shape == start[name].shape and not torch.equal(stored[name], start[name])
        torch.testing.assert_close(again[name], stored[name])
    assert kind_of_files(runs[1] / "model")[0].name == "image_text"
    call("export", f"run={runs[1]}", f"output_dir={tmp_path / 'exported'}")
    torch.testing.assert_close(load_file(tmp_path / "exported" / "model.safetensors"), stored, rtol=0, atol=0)
    opened = SentenceTransformer(str(runs[1] / "model"), device="cpu")
    texts = [text(1, 2), text(2, 9)]
    together, alone = opened.encode(texts), np.concatenate([opened.encode([each]) for each in texts])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)
    pictures = opened.encode([Image.open(inputs / "picture_3.png")])
    assert pictures.shape == (1, together.shape[1])
    again = [f"model.path={runs[1] / 'model'}", "train.steps=1", "tracking.report=false"]
    ranks(1, run_without_base, *options(inputs, tmp_path / "next", *again))


def test_a_new_pair_trains_with_a_frozen_tower(ranks, inputs, tmp_path):
    """Pictures by the model as it is, with CLIP's loss, a learning rate a tower, and adapters of texts."""
    more = [
        f"model.text.path={inputs / 'bert'}", f"model.image={{path: {inputs / 'vit'}, frozen: true}}",
        "tracking.report=false",
        "model.projection_dim=24", "loss.directions=[query_document,document_query]", "loss.partition_mode=separate",
        "loss.learn_temperature=true", 'optim.groups=[{match: "^text[.]", lr: 1e-4}]', "train.steps=2",
    ]  # fmt: skip
    ranks(2, run_without_base, *options(inputs, tmp_path / "pair", *more))
    stored = load_file(tmp_path / "pair" / "model" / "model.safetensors")
    for tower, before, is_frozen in (("vision", "vit", True), ("text", "bert", False)):
        weights = AutoModel.from_pretrained(inputs / before).state_dict()
        equal = {torch.equal(stored[f"{tower}_model.{name}"], weight) for name, weight in weights.items()}
        assert equal == {True} if is_frozen else False in equal
    assert not torch.equal(stored["logit_scale"], torch.tensor(2.6592))


def test_adapters_of_one_tower_are_merged_and_a_file_of_their_own(ranks, inputs, tmp_path):
    """The command reads the same layers and the trained temperature from a checkpoint; PEFT opens the adapters."""
    more = [
        f"model.path={inputs / 'clip'}", "model.lora={rank: 2, targets: [text.q_proj]}", "loss.learn_temperature=true",
        "train.steps=2", "export.formats=[sentence_transformers,adapter]", "tracking.report=false",
    ]  # fmt: skip
    ranks(1, run_without_base, *options(inputs, tmp_path / "run", *more))
    stored, before = load_file(tmp_path / "run/model/model.safetensors"), load_file(inputs / "clip/model.safetensors")
    changed = {name for name in before if not torch.equal(stored[name], before[name])}
    assert changed == {*(f"text_model.encoder.layers.{n}.self_attn.q_proj.weight" for n in range(2)), "logit_scale"}
    call("export", f"run={tmp_path / 'run'}", f"output_dir={tmp_path / 'exported'}", "formats=[adapter]", "check=false")
    torch.testing.assert_close(load_file(tmp_path / "exported/model.safetensors"), stored, rtol=0, atol=0)
    merged = AutoModel.from_pretrained(tmp_path / "run/model")
    for directory in (tmp_path / "run/model/adapter", tmp_path / "exported/adapter"):
        adapted = PeftModel.from_pretrained(AutoModel.from_pretrained(inputs / "clip"), directory)
        given = {
            "get_text_features": {"input_ids": torch.tensor([[5, 9, 25]])},
            "get_image_features": {"pixel_values": torch.ones(1, 3, 32, 32)},
        }
        for method, values in given.items():
            vectors, expected = (getattr(model, method)(**values).pooler_output for model in (adapted, merged))
            torch.testing.assert_close(vectors, expected)


def test_pictures_are_mined_from_a_corpus(ranks, inputs, tmp_path):
    """On two ranks, of which one reads the corpus; what is written is read as rows, with copies of its pictures."""
    encoded = [{"bytes": (inputs / f"picture_{i}.png").read_bytes(), "path": None} for i in range(20, 27)]
    pq.write_table(pa.table({"id": [str(i) for i in range(7)], "image": encoded}), tmp_path / "corpus.parquet")
    arguments = [
        f"data=[{inputs / 'more.parquet'}]", f"corpus=[{tmp_path / 'corpus.parquet'}]",
        f"output_dir={tmp_path / 'mined'}", f"model={inputs / 'clip'}", "negatives=2", "precision=fp32",
        f"cache_dir={tmp_path / 'cache'}", "relative_margin=null",
    ]  # fmt: skip
    ranks(2, mine, arguments)
    summary = (tmp_path / "mined" / "summary.json").read_text()
    assert MARK not in summary and "[picture " in summary
    mined = tmp_path / "mined" / "more.jsonl"
    (store,) = read_sources([TrainSource(path=str(mined))], OnError.stop, cache=Cache(directory=tmp_path / "cache"))
    assert len(store) == 24 and store.report.num_pictures > 20
    assert all(len(row.negatives) == 2 and all(map(has_pictures, row.texts[1:])) for row in store)
