"""What tests say of colpali-engine, compared with the package: on demand, where it is installed.

It needs torchvision, which tests do not install. To run: `pip install colpali-engine`, in an environment of its own.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from embedtrain.commands.export import ExportOptions
from embedtrain.commands.export.convert import open_run
from embedtrain.data.images.files import PICTURES, Place, read_picture
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.formats.peft import AdapterCheckpoint
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import enable_packing
from tests.late_vision_models import (
    ENGINE,
    ENGINE_CLASSES,
    TRANSFORMERS,
    LateOracle,
    late_oracle,
    save_late_adapter,
    save_late_model,
)
from tests.vision_language.test_late_interaction import loaded, opened, rows, train
from tests.vision_language.test_page_libraries import convert

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("colpali_engine") is None, reason="colpali-engine is not installed"),
]
Image = pytest.importorskip("PIL.Image")
__all__ = ["rows"]  # a fixture
QUERIES = ("who and where?", "  two\nlines\n", "a query of more words than the others about the cities of the world")


def engine_oracle(architecture: str, directory: Path, processor: Path | None = None) -> LateOracle:
    """The class of colpali-engine and its processor."""
    package: Any = importlib.import_module("colpali_engine.models")
    model_class, processor_class = (getattr(package, name) for name in ENGINE_CLASSES[architecture])
    model = model_class.from_pretrained(directory).eval()
    made = processor_class.from_pretrained(processor or directory)

    def inputs(role: str, item: Any) -> dict[str, Any]:
        if not isinstance(item, str):
            values = made.process_images([item])
        else:
            values = made.process_queries([item]) if role == "query" else made.process_texts([item])
        return {name: value for name, value in values.items() if name != "labels"}

    return LateOracle(model, inputs)


def pages() -> list[Any]:
    """Square, wide and narrow, of sizes that no processor of the tests resizes but for tiles, which have one colour."""
    return [Image.new("RGB", size, color) for size, color in (((16, 16), (200, 40, 90)), ((32, 16), (10, 210, 60)))]


def require_equal(ours: LateOracle, theirs: LateOracle, tolerance: float = 1e-6) -> None:
    for role, item in [("query", text) for text in QUERIES] + [("document", text) for text in QUERIES]:
        assert ours.ids(role, item) == theirs.ids(role, item), role
        torch.testing.assert_close(ours.vectors(role, item), theirs.vectors(role, item), atol=tolerance, rtol=0)
    for page in pages():
        assert ours.ids("document", page) == theirs.ids("document", page)
        torch.testing.assert_close(
            ours.vectors("document", page), theirs.vectors("document", page), atol=tolerance, rtol=0
        )


@pytest.mark.parametrize("architecture", ENGINE_CLASSES)
def test_what_the_oracle_computes_is_what_the_package_computes(architecture, tmp_path):
    directory = save_late_model(ENGINE, architecture, tmp_path)
    require_equal(late_oracle(ENGINE, directory), engine_oracle(architecture, directory))
    adapter, merged = save_late_adapter(architecture, directory, tmp_path)
    require_equal(late_oracle(ENGINE, merged), engine_oracle(architecture, adapter, directory))


def encoder_oracle(encoder: Encoder, tokenizer: TextTokenizer, folder: Path) -> LateOracle:
    """The vectors of an encoder, packed."""

    def inputs(role: str, item: Any) -> dict[str, Any]:
        if not isinstance(item, str):
            item.save(folder / "page.png")
            place = Place(str(folder / "page.png"))
            PICTURES.add(picture := read_picture(place), place)
            item = str(picture)
        tokens = tokenizer.tokens([item], role=TextRole(role))
        chunk = tokenizer.chunk(tokens, [0])
        return {"input_ids": chunk.ids, "chunk": chunk}

    return LateOracle(lambda input_ids, chunk: encoder(chunk)[0][None], inputs)


@pytest.mark.parametrize("architecture", ["paligemma", "qwen2_vl", "qwen2_5_vl", "modernvbert"])
def test_converted_directories_are_opened(architecture, tmp_path):
    directory = save_late_model(TRANSFORMERS, architecture, tmp_path, dimension=128)
    converted = convert(directory, ENGINE, tmp_path / "converted")
    source, tokenizer = opened(converted, max_length=200)  # more than a page of PaliGemma has
    require_equal(encoder_oracle(loaded(source), tokenizer, tmp_path), engine_oracle(architecture, converted))


@pytest.mark.parametrize("architecture", ENGINE_CLASSES)
def test_trained_here_and_opened_by_the_package(ranks, rows, architecture, tmp_path):
    """Its vectors are those of the checkpoint's weights, from an adapter of the package on."""
    directory = save_late_model(ENGINE, architecture, tmp_path)
    adapter, _ = save_late_adapter(architecture, directory, tmp_path)
    options = [
        "name=t", "model.kind=late_interaction", "train.global_batch_size=8", "train.steps=3", "train.chunk_tokens=300",
        "optim.lr=1e-2", "loss.temperature=0.02", "parallel.precision=fp32", "parallel.compile=false",
        "checkpoint.every=3", f"model.path={directory}", f"data.train=[{rows / 'train.jsonl'}]",
        "model.similarity=meanmaxsim", f"output_dir={tmp_path / 'run'}", f"model.lora.path={adapter}",
    ]  # fmt: skip
    ranks(2, train, rows, *options)
    exported = tmp_path / "run/model"
    run = open_run(str(tmp_path / "run"), ExportOptions())
    source, tokenizer = opened(exported, max_length=200)
    with run.checkpoint.tensors(run.kind) as reader:
        checkpoint = AdapterCheckpoint.open(run.run_dir.adapter, run.recipe.model, run.recipe.seed, source, reader)
        encoder = checkpoint.encoder()
    enable_packing(encoder)
    trained = encoder_oracle(encoder.eval(), tokenizer, tmp_path)
    require_equal(trained, theirs := engine_oracle(architecture, exported), 1e-5)
    before = engine_oracle(architecture, adapter, directory)
    assert (before.vectors("query", QUERIES[0]) - theirs.vectors("query", QUERIES[0])).abs().max() > 1e-2
