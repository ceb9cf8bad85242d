"""Checksums of stored files: every flipped bit is detected, and an absurd manifest is rejected at once."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.recipe import ParallelConfig, Pooling
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, DataError, ModelError
from embedtrain.formats.export_record import RECORD, verify_settings, verify_weights, write_record
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.report.sample import (
    Pair,
    PairRelation,
    Role,
    Sample,
    SampleText,
    read_texts,
    read_vectors,
    write_texts,
    write_vectors,
)
from embedtrain.utils.files import CHECKSUMS, Checksums, checksum_of, damaged_files, write_checksums
from tests.ranks import RankFailed
from tests.small import model_options, save_small, small_model, small_tokenizer


def flip(path: Path, draw: random.Random) -> bytes:
    """Flip a random bit of a file; returns the content before."""
    before = path.read_bytes()
    damaged = bytearray(before)
    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    path.write_bytes(damaged)
    return before


def test_flipped_bits_of_a_tokenizer_and_an_architecture(tmp_path):
    run = RunDirectory(tmp_path)
    small_tokenizer().save_pretrained(run.architecture)
    (run.architecture / "1_Pooling").mkdir()
    (run.architecture / "1_Pooling" / "config.json").write_text("{}")
    write_checksums(run.architecture)
    run.require_intact()
    paths = sorted(path for path in run.architecture.rglob("*") if path.is_file())
    draw = random.Random(3)
    for number in range(300):
        path = paths[number % len(paths)]
        before = flip(path, draw)
        assert damaged_files(run.architecture) == [str(path.relative_to(run.architecture))]
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            run.require_intact()
        path.write_bytes(before)
    shutil.rmtree(run.architecture / "1_Pooling")
    assert damaged_files(run.architecture) == ["1_Pooling/config.json"]


def load(world: World, path: str) -> None:
    load_model(model_options(path=path, pooling=Pooling.mean), ParallelConfig(), world, seed=0, work=None)


def test_flipped_bits_of_an_exported_model(tmp_path, ranks):
    """Every rank verifies the settings; the ranks of a host share the weights, and all of them name the file."""
    model = save_small(small_model("bert"), tmp_path / "model")
    for name in ("1_Pooling", "adapter"):
        (model / name).mkdir()
        (model / name / "config.json").write_text("{}")
    (model / "README.md").write_text("of the export")
    write_record(model)
    ranks(2, load, str(model))
    weights, record = model / "model.safetensors", model / RECORD
    paths = [path for path in sorted(model.rglob("*.*")) if path.parent.name != "adapter" and path != record]
    paths.remove(model / "README.md")
    (model / "README.md").write_text("of the user")
    (model / "adapter" / "config.json").unlink()
    verify_settings(model)
    draw = random.Random(5)
    for number in range(200):
        path = paths[number % len(paths)]
        before = flip(path, draw)
        with pytest.raises(ModelError, match=f"{path} .*delete {record}"):
            verify_weights(model) if path == weights else verify_settings(model)
        path.write_bytes(before)
    flip(weights, draw)
    with pytest.raises(RankFailed) as failure:
        ranks(2, load, str(model))
    assert all(f"{weights} is not what was exported" in text for text in str(failure.value).split("rank 1:"))
    flip(record, draw)
    with pytest.raises(ModelError, match=f"{record}.*damaged.*delete this file"):
        open_model_source(model_options(path=str(model), pooling=Pooling.mean))
    record.unlink()
    open_model_source(model_options(path=str(model), pooling=Pooling.mean))


def test_flipped_bits_of_the_sample_of_a_report(tmp_path):
    sample = Sample(
        [SampleText(f"text {i}", Role.text, "dev", True) for i in range(3)], [Pair(0, 1, PairRelation.high)]
    )
    write_texts(tmp_path, sample)
    write_vectors(tmp_path, "before", np.arange(12, dtype=np.float32).reshape(3, 4) + 1, 7)
    vectors = read_vectors(tmp_path, "before", sample)
    draw, paths = random.Random(4), sorted(tmp_path.iterdir())
    detected = 0
    for number in range(300):
        path = paths[number % len(paths)]
        before = flip(path, draw)
        try:
            assert read_texts(tmp_path) == sample
            read = read_vectors(tmp_path, "before", sample)
            assert read.step == vectors.step
            assert np.array_equal(read.values, vectors.values)
        except DataError as error:
            assert str(path) in str(error)
            detected += 1
        path.write_bytes(before)
    assert detected > 250


@pytest.mark.parametrize(
    "files",
    [
        {"a": [10**11, ["0"]]},
        {"a": [-1, []]},
        {"a": [1e308, ["0"]]},
        {"../a": [1, ["0"]]},
        {"/dev/zero": [0, []]},
        {"a": [1, 3]},
        {"a": 3},
        [],
        "a",
    ],
)
def test_absurd_entries_are_damage(tmp_path, files):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / CHECKSUMS).write_text(json.dumps({"files": files, "checksum": checksum_of(files)}))
    assert damaged_files(tmp_path) in ([CHECKSUMS], ["a"])


def test_links_and_pipes_are_not_read(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    write_checksums(tmp_path)
    (tmp_path / "a").rename(tmp_path.parent / "elsewhere")
    (tmp_path / "a").symlink_to(tmp_path.parent / "elsewhere")
    assert damaged_files(tmp_path) == ["a"]


def test_processes_share_the_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("embedtrain.utils.files.BLOCK_BYTES", 100)
    (tmp_path / "a").write_bytes(bytes(250))
    (tmp_path / "b").write_bytes(b"")
    write_checksums(tmp_path)
    checksums = Checksums.read(tmp_path / CHECKSUMS)
    assert checksums.split(200) == ([("a", 0), ("a", 1)], [("a", 2)])
    (tmp_path / "a").write_bytes(bytes(249) + b"1")
    assert [damaged_files(tmp_path, rank, 3) for rank in range(3)] == [[], [], ["a"]]
