"""Vectors of a teacher: written once by any number of ranks, resumed, and the same loss as with the live teacher."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from sentence_transformers import SentenceTransformer

from embedtrain.commands.vectors import compose as compose_vectors
from embedtrain.commands.vectors import run as main
from embedtrain.config.losses import DistillEmbeddingsConfig, TeacherMap
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, EmbedtrainError
from embedtrain.formats.weights import directory_digest
from embedtrain.inference import vector_directory
from embedtrain.inference.vector_directory import KEY_TYPE, StoredVectors
from embedtrain.losses.build import build_loss
from embedtrain.training import guides
from tests.runs import losses, run_without_base
from tests.safety.payloads import MARKER, edit, plant_module
from tests.small import batch, model_options, save_adapter, save_guide, save_small, small_model, text

BASE = [
    "name=t", "model.pooling=mean", "train.global_batch_size=10", "train.log_every=1", "train.chunk_tokens=60",
    "train.steps=3", "parallel.strategy=fsdp", "parallel.precision=fp32", "optim.lr=1e-3", "export.check=false",
    "tracking.report=false",
    "loss=distill_similarities", "loss.temperature=0.2",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A model, a teacher with prompts, and 26 rows, of which several have equal texts."""
    folder = tmp_path_factory.mktemp("vectors")
    save_small(small_model("xlm-roberta"), folder / "model")
    guide = save_guide(small_model("bert"), folder, seed=1)
    settings = guide / "config_sentence_transformers.json"
    prompts = {"query": f"{text(900, 2)} ", "document": f"{text(901, 1)} "}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"prompts": prompts}))
    lines = [
        {
            "query": row.query,
            "pos": list(row.documents.texts[:1]),
            "neg": [*row.documents.texts[1:], text(400 + i % 5, 5)],
        }
        for i, row in enumerate(batch(26).rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def write(_world: Any, arguments: Sequence[str]) -> None:
    main(compose_vectors(list(arguments)))


def options(inputs: Path, output_dir: Path, *more: str) -> list[str]:
    data = f"data=[{inputs / 'rows.jsonl'}]"
    return [f"model={inputs / 'guide'}", data, f"output_dir={output_dir}", "rows_per_part=16", *more]


def rejection(_world: Any, arguments: Sequence[str]) -> str:
    with pytest.raises(EmbedtrainError) as error:
        write(None, arguments)
    return str(error.value)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def train(world: World, *arguments: str) -> str:
    return run_without_base(world, *BASE, *arguments)[0]


def training(inputs: Path, out: Path, teacher: Path, *more: str) -> list[str]:
    rows = f"data.train=[{inputs / 'rows.jsonl'}]"
    return [f"model.path={inputs / 'model'}", rows, f"output_dir={out}", f"loss.teacher={teacher}", *more]


def test_vectors_are_those_of_the_teacher_on_any_number_of_ranks(ranks, inputs, tmp_path):
    for size, name in ((1, "one"), (3, "three")):
        ranks(size, write, options(inputs, tmp_path / name, "dtype=fp32"))
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    stored = StoredVectors.open(str(tmp_path / "one"))
    teacher = SentenceTransformer(str(inputs / "guide"), device="cpu")
    rows = [json.loads(line) for line in (inputs / "rows.jsonl").read_text().splitlines()]
    queries, documents = [row["query"] for row in rows], [t for row in rows for t in (*row["pos"], *row["neg"])]
    assert stored.index["count"] == len(set(queries)) + len(set(documents))
    for role, texts in ((TextRole.query, queries), (TextRole.document, documents)):
        expected = teacher.encode(texts, prompt_name=role.value, convert_to_tensor=True)
        torch.testing.assert_close(stored.vectors(stored.rows(role, texts)), expected, rtol=1e-5, atol=1e-5)
    assert (stored.rows(TextRole.query, documents[:1]) == -1).all()
    for dtype, tolerance in (("bf16", 4e-3), ("fp16", 5e-4), ("int8", 4e-3)):
        ranks(1, write, options(inputs, tmp_path / dtype, f"dtype={dtype}", "dims=8"))
        narrow = StoredVectors.open(str(tmp_path / dtype))
        assert narrow.dimension == 8
        actual = narrow.vectors(narrow.rows(TextRole.query, queries))
        exact = stored.vectors(stored.rows(TextRole.query, queries))[:, :8]
        torch.testing.assert_close(actual, exact, rtol=tolerance, atol=tolerance)


class Killed(Exception):
    """In place of a kill after some parts."""


def write_partly(_world: Any, arguments: Sequence[str], parts: int) -> None:
    original = vector_directory.VectorDirectory.write_part

    def stop_after(self: Any, part: int, encoder: Any) -> None:
        if part == parts:
            raise Killed
        original(self, part, encoder)

    vector_directory.VectorDirectory.write_part = stop_after
    try:
        with pytest.raises(Killed):
            write(None, arguments)
    finally:
        vector_directory.VectorDirectory.write_part = original


def replace_parts(world: World, directory: Path) -> int:
    """Parts of other inputs are removed by rank 0, as slowly as on a network file system."""
    texts = vector_directory.DistinctTexts([], np.zeros(40, dtype="S16"), *(np.zeros(40, dtype=int) for _ in "123"))
    own = vector_directory.VectorDirectory(directory, model_options(), {"rows_per_part": 2}, texts, world)
    read_text, remove_tree = Path.read_text, vector_directory.remove_tree

    def read_late(path: Path, *args: Any, **options: Any) -> str:
        time.sleep(0.4 if world.rank else 0.1)
        return read_text(path, *args, **options)

    def remove_slowly(path: Path) -> None:
        remove_tree(path)
        time.sleep(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", read_late)
        patch.setattr(vector_directory, "remove_tree", remove_slowly)
        world.gather(None)  # all begin together
        return len(own._written_parts())


def test_ranks_do_not_read_what_the_first_removes(ranks, tmp_path):
    unfinished = tmp_path / "out.unfinished"
    unfinished.mkdir()
    (unfinished / "inputs.json").write_text("others")
    for part in range(20):
        (unfinished / f"part-{part:05}.safetensors").write_bytes(b"x")
    assert ranks(3, replace_parts, tmp_path / "out") == [0, 0, 0]
    assert [path.name for path in unfinished.iterdir()] == ["inputs.json"]


def test_vectors_of_another_adapter_are_no_result_of_this_command(ranks, inputs, tmp_path):
    adapter = save_adapter(inputs / "guide", tmp_path / "adapter", seed=1)
    arguments = options(inputs, tmp_path / "out", f"adapter={adapter}")
    ranks(1, write, arguments)
    ranks(1, write, arguments)  # nothing to do
    save_adapter(inputs / "guide", adapter, seed=2)
    (message,) = ranks(1, rejection, arguments)
    assert "of other inputs" in message
    (message,) = ranks(1, rejection, options(inputs, tmp_path / "out"))
    assert "of other inputs" in message


def test_an_interrupted_command_resumes(ranks, inputs, tmp_path):
    ranks(1, write, options(inputs, tmp_path / "whole"))
    again = options(inputs, tmp_path / "cut")
    ranks(2, write_partly, again, 2)
    unfinished = tmp_path / "cut.unfinished"
    assert not (tmp_path / "cut").exists()
    first, second = unfinished / "part-00000.safetensors", unfinished / "part-00001.safetensors"
    damaged = bytearray(second.read_bytes())
    damaged[-1] ^= 1
    second.write_bytes(damaged)
    before = first.stat().st_mtime_ns
    ranks(1, write, again)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert (tmp_path / "cut" / first.name).stat().st_mtime_ns == before
    assert not unfinished.exists()
    (message,) = ranks(1, rejection, [*again, "query_prompt='other: '"])
    digest = StoredVectors.open(str(tmp_path / "cut")).index["inputs"]
    assert str(tmp_path / "cut") in message
    assert digest in message


def test_two_commands_cannot_write_one_directory(ranks, inputs, tmp_path):
    with FileLock(tmp_path / ".embedtrain-stored.lock"):
        (message,) = ranks(1, rejection, options(inputs, tmp_path / "stored", "timeout=2"))
    assert f"output_dir={tmp_path / 'stored'} is in use by another run" in message
    ranks(1, write, options(inputs, tmp_path / "stored"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stored"]


def test_files_of_the_user_beside_the_directory_are_not_replaced(ranks, inputs, tmp_path):
    own = [tmp_path / name for name in ("stored.lock", "stored.unfinished/notes.txt", "important/notes.txt")]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("of the user")
    (message,) = ranks(1, rejection, options(inputs, tmp_path / "stored"))
    assert f"{tmp_path / 'stored.unfinished'} is where vectors are written" in message
    (tmp_path / "other.unfinished").symlink_to(tmp_path / "important")
    (message,) = ranks(1, rejection, options(inputs, tmp_path / "other"))
    assert "is a link, through which nothing is written" in message
    assert [path.read_text() for path in own] == ["of the user"] * 3


def test_training_without_the_teacher(ranks, inputs, tmp_path):
    """The losses of the live teacher, on another number of ranks; other vectors or weights are another run."""
    ranks(1, write, options(inputs, tmp_path / "stored", "dtype=fp32"))
    live = shutil.copytree(inputs / "guide", tmp_path / "guide")
    ranks(1, train, *training(inputs, tmp_path / "live", live))
    out = tmp_path / "cached"
    output = ranks(2, train, *training(inputs, out, tmp_path / "stored"))[0]
    assert f"guide or teacher {tmp_path / 'stored'}" in output
    assert losses(out) == pytest.approx(losses(tmp_path / "live"), rel=1e-4)
    os.rename(tmp_path / "stored", tmp_path / "first")
    ranks(1, write, options(inputs, tmp_path / "stored", "dtype=fp32", "query_prompt=''"))
    digests = [StoredVectors.open(str(tmp_path / name)).digest for name in ("first", "stored")]
    with pytest.raises(AssertionError, match=rf"teacher.*{digests[0]}.*{digests[1]}"):
        ranks(1, train, *training(inputs, out, tmp_path / "stored", "train.steps=4"))
    before = directory_digest(live)
    (live / "README.md").write_text("not part of the model")
    assert directory_digest(live) == before
    with (live / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(AssertionError, match=rf"teacher.*{live}.*{before}.*{directory_digest(live)}"):
        ranks(1, train, *training(inputs, tmp_path / "live", live, "train.steps=4"))


def test_a_missing_text_is_named(ranks, inputs, tmp_path):
    ranks(1, write, options(inputs, tmp_path / "stored"))
    rows = (inputs / "rows.jsonl").read_text().splitlines()
    row = json.loads(rows[3])
    for changed, message in (
        ({**row, "query": "new text"}, r"rows\.jsonl:4: .*stored has no vector of the query 'new text'"),
        ({**row, "neg": [row["query"]]}, r"rows\.jsonl:4: .*of the document .* it has one as a query"),
    ):
        (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:3], json.dumps(changed), *rows[4:]]))
        with pytest.raises(AssertionError, match=message):
            ranks(2, train, *training(tmp_path, tmp_path / "out", tmp_path / "stored", f"model.path={inputs}/model"))


def test_texts_that_a_directory_lacks_are_encoded_at_the_start(ranks, inputs, tmp_path):
    """With the losses of a complete directory; its model must be the same."""
    guide = shutil.copytree(inputs / "guide", tmp_path / "guide")
    part, rows = tmp_path / "part", (inputs / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:18]))
    ranks(1, write, options(inputs, tmp_path / "whole", "dtype=fp32"))
    ranks(1, write, options(tmp_path, part, "dtype=fp32"))
    ranks(1, train, *training(inputs, tmp_path / "expected", tmp_path / "whole"))
    actual = training(inputs, tmp_path / "found", part, "loss.on_missing=encode")
    output = ranks(2, train, *actual)[0]
    whole, stored = (StoredVectors.open(str(tmp_path / name)).index["count"] for name in ("whole", "part"))
    assert f"lacks {whole - stored} texts, which {guide} encodes" in output
    assert losses(tmp_path / "found") == pytest.approx(losses(tmp_path / "expected"), rel=1e-4)
    (more,) = (tmp_path / "found" / "teacher-vectors").iterdir()
    written = (more / "vectors.json").stat().st_mtime_ns
    ranks(1, train, *actual, "train.steps=4")
    assert (more / "vectors.json").stat().st_mtime_ns == written
    with (guide / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(AssertionError, match=rf"{part} lacks .* model {guide} is no longer"):
        ranks(1, train, *training(inputs, tmp_path / "other", part, "loss.on_missing=encode"))


def test_trust_in_the_trained_model_is_none_in_its_teacher(ranks, inputs, tmp_path):
    """Neither in a model that only the vectors' directory names, nor in one whose texts are encoded in the training."""
    guide = shutil.copytree(inputs / "guide", tmp_path / "guide")
    rows = (inputs / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:18]))
    ranks(1, write, options(tmp_path, tmp_path / "part"))
    plant_module(guide, tmp_path / MARKER)
    edit(guide / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    trust = "model.trust_remote_code=true"
    for teacher, more, words in (
        (tmp_path / "part", ["loss.on_missing=encode"], r"auto_map.*write the vectors of all texts with embedtrain"),
        (guide, [], r"auto_map.*is for the trained model alone: write its vectors with embedtrain vectors"),
    ):
        with pytest.raises(AssertionError, match=words):
            ranks(1, train, *training(inputs, tmp_path / "out", teacher, trust, *more))
        assert not (tmp_path / MARKER).exists()


def test_bad_options_and_directories(tmp_path, inputs):
    for more, message in (
        ("dims=0", r"^dims=0"),
        ("rows_per_part=0", r"^rows_per_part=0"),
        (f"output_dir={inputs}/sub data=[{inputs}]", r"^output_dir=.*sub is in"),
    ):
        with pytest.raises(ConfigError, match=message):
            compose_vectors([*options(inputs, tmp_path / "out"), *more.split()])
    np.save(tmp_path / "keys.npy", np.zeros(2))
    (tmp_path / "vectors.json").write_text('{"format": 1, "sizes": {"keys.npy": 3}}')
    with pytest.raises(DataError, match=str(tmp_path)):
        StoredVectors.open(str(tmp_path))
    # The digest names a folder of the run that trains with the vectors: it leads nowhere else.
    index = {"format": 1, "sizes": {}, "count": 2, "dimension": 4, "rows_per_part": 2, "digest": "../../elsewhere"}
    np.save(tmp_path / "keys.npy", np.zeros(2, KEY_TYPE))
    for digest, is_valid in (("0" * 32, True), ("../../elsewhere", False), (f"{'0' * 31}/", False), (5, False)):
        (tmp_path / "vectors.json").write_text(json.dumps(index | {"digest": digest}))
        if is_valid:
            assert StoredVectors.open(str(tmp_path)).digest == digest
            continue
        with pytest.raises(DataError, match="not a directory of vectors"):
            StoredVectors.open(str(tmp_path))


def fitted_map(world: World, path: str, dimension: int) -> torch.Tensor:
    config = DistillEmbeddingsConfig(teacher=path, teacher_map=TeacherMap.pca)
    loss = build_loss(config, dimension=dimension, guide_dimensions={path: 32}, seed=0)
    before, guides._BLOCK = guides._BLOCK, 8
    try:
        guides.set_teacher_maps(loss, {path: guides.StoredTeacher(path)}, world)
    finally:
        guides._BLOCK = before
    return dict(loss.named_buffers())["teacher_projection"]


@pytest.mark.slow
def test_teacher_map_of_principal_components(ranks, inputs, tmp_path):
    """Those of all vectors on any number of ranks: the best map for their inner products. A live teacher has none."""
    stored = tmp_path / "stored"
    ranks(1, write, options(inputs, stored, "dtype=fp32"))
    maps = [matrix for size in (1, 3) for matrix in ranks(size, fitted_map, str(stored), 8)]
    for matrix in maps[1:]:
        torch.testing.assert_close(matrix, maps[0], atol=1e-5, rtol=0)
    opened = StoredVectors.open(str(stored))
    vectors = opened.vectors(np.arange(len(opened.keys))).double()
    _, _, components = torch.linalg.svd(vectors, full_matrices=False)
    best, actual = vectors @ components[:8].T, vectors @ maps[0].double()
    torch.testing.assert_close(actual @ actual.T, best @ best.T, atol=1e-5, rtol=0)
    largest = maps[0].T[torch.arange(8), maps[0].abs().argmax(dim=0)]
    assert (largest > 0).all()

    more = ["loss=distill_embeddings", "loss.teacher_map=pca", "model.heads=[{out: 8}]"]
    base = [option for option in BASE if not option.startswith("loss")]

    def arguments(name: str, teacher: Path) -> list[str]:
        return [*base, *training(inputs, tmp_path / name, teacher, *more)]

    for size, name in ((1, "one"), (2, "two")):
        ranks(size, run_without_base, *arguments(name, stored))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    (message,) = ranks(1, failed, *arguments("live", inputs / "guide"))
    assert "loss.teacher_map=pca" in message
    assert str(inputs / "guide") in message


def failed(world: World, *arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        run_without_base(world, *arguments)
    return str(error.value)
