"""Tensor files: bytes as the safetensors library writes them, any rows can be read, any damage is detected."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embedtrain.checkpoint import tensor_files as tensor_files_module
from embedtrain.checkpoint.snapshot import WEIGHTS
from embedtrain.checkpoint.tensor_files import (
    DTYPE_NAMES,
    LocalShard,
    ShardPosition,
    TensorReader,
    TensorSpec,
    describe_tensors,
    tensor_files,
    write_local_shards,
)
from embedtrain.config.recipe import CheckpointLayout
from embedtrain.errors import CheckpointError

LAYOUTS = list(CheckpointLayout)


def random_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


def all_types() -> tuple[dict[str, Tensor], frozenset[str]]:
    """Tensors of every type and of unusual shapes, and the names of those that are sharded."""
    torch.manual_seed(0)
    sharded = {f"rows.{name}": random_of(dtype, 7, 3) for dtype, name in DTYPE_NAMES.items()}
    sharded |= {
        "uneven": torch.randn(10, 2, 3),
        "one row": torch.randn(1, 5),
        "vector": torch.randn(5),
        "no rows": torch.randn(0, 4),
        "no columns": torch.randn(4, 0),
        "transposed": torch.randn(3, 9).T,
    }
    unsharded = {f"scalar.{name}": random_of(dtype) for dtype, name in DTYPE_NAMES.items()}
    unsharded |= {"buffer": torch.randn(6, 2)}
    return sharded | unsharded, frozenset(sharded)


def write(
    folder: Path, tensors: Mapping[str, Tensor], sharded: frozenset[str], layout: CheckpointLayout, num_shards: int
) -> TensorReader:
    """Write as `num_shards` ranks, one after the other."""
    folder.mkdir()
    checksums = []
    for shard in range(num_shards):
        shards = {}
        for name, tensor in tensors.items():
            size = -(-len(tensor) // num_shards) if name in sharded else 0
            rows = tensor[size * shard : size * (shard + 1)] if name in sharded else tensor
            first = min(size * shard, len(tensor)) if size else 0
            shards[name] = LocalShard(TensorSpec.of(tensor), rows, first, name in sharded)
        files = tensor_files(WEIGHTS, shards, layout, num_shards)
        checksums.append(write_local_shards(folder, files, ShardPosition(0, shard, num_shards), shards))
    return TensorReader(folder, WEIGHTS, layout, num_shards, describe_tensors(files, checksums))


@pytest.mark.parametrize("shards", [1, 3])
def test_full_layout_equals_a_file_of_the_library(tmp_path, shards):
    tensors, sharded = all_types()
    write(tmp_path / "ours", tensors, sharded, CheckpointLayout.full, shards)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / "weights.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 12])
def test_every_shard_is_a_file_that_the_library_reads(tmp_path, shards):
    tensors, sharded = all_types()
    write(tmp_path / "ours", tensors, sharded, CheckpointLayout.sharded, shards)
    paths = sorted((tmp_path / "ours").iterdir())
    assert [path.name for path in paths] == [f"weights-{n:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    files = [load_file(path) for path in paths]
    for name, tensor in tensors.items():
        parts = [file[name] for file in files if name in file]
        whole = torch.cat(parts) if name in sharded and parts else (parts or [tensor[:0]])[0]
        assert torch.equal(whole, tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 12])
def test_any_rows_can_be_read_for_any_number_of_shards(tmp_path, layout, num_shards):
    tensors, sharded = all_types()
    with write(tmp_path / "ours", tensors, sharded, layout, num_shards) as reader:
        reader.require_sizes()
        reader.verify_checksums(0, 1)
        assert {name: (spec.dtype, spec.shape) for name, spec in reader.specs.items()} == {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            if not tensor.dim():
                ((first, value),) = reader.all_rows(name)
                assert first == 0
                assert torch.equal(value, tensor), name
                continue
            for start in range(len(tensor) + 1):
                for end in range(start, len(tensor) + 1):
                    row = start
                    for first, rows in reader.rows(name, start, end):
                        assert first == row, f"rows of {name} are missing or occur twice"
                        row = first + len(rows)
                        assert torch.equal(rows, tensor[first:row]), name
                    assert row == end or not tensor.numel(), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("readers", [1, 3])
def test_a_flipped_bit_anywhere_is_detected(tmp_path, layout, readers):
    """In each byte of each file in turn: by exactly one of the ranks, with the file and the tensor."""
    torch.manual_seed(0)
    tensors = {"a": torch.randn(5, 2), "b": random_of(torch.int64), "c": random_of(torch.bool, 3, 1)}
    stored = write(tmp_path / "ours", tensors, frozenset("ac"), layout, 2)
    for path in sorted((tmp_path / "ours").iterdir()):
        intact = path.read_bytes()
        header = int.from_bytes(intact[:8], "little") + 8
        for offset in range(len(intact)):
            path.write_bytes(intact[:offset] + bytes([intact[offset] ^ 4]) + intact[offset + 1 :])
            errors = []
            for rank in range(readers):
                try:
                    stored.verify_checksums(rank, readers)
                except CheckpointError as error:
                    errors.append(str(error))
            assert len(errors) == 1, (path.name, offset)
            what = "header" if offset < header else "checksum of [abc] "
            assert re.search(f"{path.name} is damaged: .*{what}", errors[0])
        path.write_bytes(intact)
    stored.verify_checksums(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_or_truncated_file_is_reported(tmp_path, layout):
    reader = write(tmp_path / "ours", {"a": torch.randn(50, 2)}, frozenset("a"), layout, 2)
    path = max((tmp_path / "ours").iterdir())
    intact = path.read_bytes()
    for length in (0, 7, len(intact) - 1):
        path.write_bytes(intact[:length])
        with pytest.raises(CheckpointError, match=f"{path.name} .*{length} bytes.* {len(intact)}"):
            reader.require_sizes()
        with pytest.raises(CheckpointError, match=path.name):
            reader.verify_checksums(0, 1)
        with pytest.raises(CheckpointError, match=path.name):
            list(reader.all_rows("a"))
    path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        reader.require_sizes()
    with pytest.raises(CheckpointError, match=path.name):
        list(reader.all_rows("a"))


@pytest.mark.parametrize(
    "description",
    [
        {"a": {"dtype": "F3", "shape": [2], "crc32": [1, 2]}},
        {"a": {"dtype": "F32", "shape": [-2], "crc32": [1, 2]}},
        {"a": {"dtype": "F32", "shape": ["2"], "crc32": [1, 2]}},
        {"a": {"dtype": "F32", "shape": 2, "crc32": [1, 2]}},
        {"a": {"dtype": "F32", "shape": [2], "crc32": [1, 2, 3]}},
        {"a": {"dtype": "F32", "shape": [2], "crc32": []}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": None},
    ],
)
def test_a_malformed_description_is_rejected(tmp_path, description):
    with pytest.raises((KeyError, TypeError, ValueError)):
        TensorReader(tmp_path, WEIGHTS, CheckpointLayout.sharded, 2, description)


def test_layouts_of_many_shards_are_made_once(monkeypatch):
    """A rank that writes needs that of its own file, and most files of a checkpoint have the same."""
    made = []
    make = tensor_files_module.file_layout
    monkeypatch.setattr(tensor_files_module, "file_layout", lambda specs: made.append(1) or make(specs))
    shapes = {"embedding": (30_000, 8), "matrix": (1024, 8), "vector": (768,), "buffer": (5,)}
    shards = {
        name: LocalShard(TensorSpec(torch.float32, shape), torch.empty(0), 0, name != "buffer")
        for name, shape in shapes.items()
    }
    files = tensor_files(WEIGHTS, shards, CheckpointLayout.sharded, 512)
    assert files.shard_layout(7).size == files.files[files.shard_file(7)].size
    assert len(files.files) == 512
    # With the buffer, all rows, no vector, fewer rows of the embedding, none of it.
    assert len(made) == 5
