"""Tensors in files: the bytes are those of the safetensors library, any rows are found, and any damage."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embedtrain.checkpoint.snapshot import WEIGHTS, LocalShard, ShardPosition
from embedtrain.checkpoint.tensor_files import TensorReader, describe_tensors, tensor_files, write_local_shards
from embedtrain.checkpoint.weight_files import DTYPE_NAMES, TensorSpec
from embedtrain.config.recipe import CheckpointLayout
from embedtrain.errors import CheckpointError

LAYOUTS = list(CheckpointLayout)


def random_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


def all_kinds() -> tuple[dict[str, Tensor], frozenset[str]]:
    """Tensors of every type and of odd shapes, and the names of those that are cut into rows."""
    torch.manual_seed(0)
    cut = {f"rows.{name}": random_of(dtype, 7, 3) for dtype, name in DTYPE_NAMES.items()}
    cut |= {
        "uneven": torch.randn(10, 2, 3),
        "one row": torch.randn(1, 5),
        "vector": torch.randn(5),
        "no rows": torch.randn(0, 4),
        "no columns": torch.randn(4, 0),
        "turned": torch.randn(3, 9).T,
    }
    whole = {f"scalar.{name}": random_of(dtype) for dtype, name in DTYPE_NAMES.items()}
    whole |= {"buffer": torch.randn(6, 2)}
    return cut | whole, frozenset(cut)


def write(
    folder: Path, tensors: Mapping[str, Tensor], cut: frozenset[str], layout: CheckpointLayout, shards: int
) -> TensorReader:
    """As so many ranks write them, one after the other."""
    folder.mkdir()
    checksums = []
    for shard in range(shards):
        parts = {}
        for name, tensor in tensors.items():
            each = -(-len(tensor) // shards) if name in cut else 0
            rows = tensor[each * shard : each * (shard + 1)] if name in cut else tensor
            parts[name] = LocalShard(
                TensorSpec.of(tensor), rows, min(each * shard, len(tensor)) if each else 0, name in cut
            )
        files = tensor_files(WEIGHTS, parts, layout, shards)
        checksums.append(write_local_shards(folder, files, ShardPosition(0, shard, shards), parts))
    return TensorReader(folder, WEIGHTS, layout, shards, describe_tensors(files, checksums))


@pytest.mark.parametrize("shards", [1, 3])
def test_full_is_what_the_library_writes(tmp_path, shards):
    tensors, cut = all_kinds()
    write(tmp_path / "ours", tensors, cut, CheckpointLayout.full, shards)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / "weights.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 12])
def test_a_shard_is_a_file_that_the_library_reads(tmp_path, shards):
    tensors, cut = all_kinds()
    write(tmp_path / "ours", tensors, cut, CheckpointLayout.sharded, shards)
    files = sorted((tmp_path / "ours").iterdir())
    assert [path.name for path in files] == [f"weights-{n:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    found = [load_file(path) for path in files]
    for name, tensor in tensors.items():
        parts = [file[name] for file in found if name in file]
        assert torch.equal(torch.cat(parts) if name in cut and parts else (parts or [tensor[:0]])[0], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("written", [1, 2, 3, 4, 12])
def test_any_rows_are_found_whatever_number_of_shards_wrote(tmp_path, layout, written):
    tensors, cut = all_kinds()
    with write(tmp_path / "ours", tensors, cut, layout, written) as stored:
        stored.require_sizes()
        stored.verify_checksums(0, 1)
        assert {name: (spec.dtype, spec.shape) for name, spec in stored.specs.items()} == {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            if not tensor.dim():
                ((first, value),) = stored.parts(name)
                assert first == 0
                assert torch.equal(value, tensor), name
                continue
            for start in range(len(tensor) + 1):
                for end in range(start, len(tensor) + 1):
                    there = start
                    for first, rows in stored.rows(name, start, end):
                        assert first == there, f"rows of {name} are left out or come twice"
                        there = first + len(rows)
                        assert torch.equal(rows, tensor[first:there]), name
                    assert there == end or not tensor.numel(), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("readers", [1, 3])
def test_a_flipped_bit_anywhere_is_found(tmp_path, layout, readers):
    """Each byte of each file in turn: by one of those who share the reading, with the file and the tensor named."""
    torch.manual_seed(0)
    tensors = {"a": torch.randn(5, 2), "b": random_of(torch.int64), "c": random_of(torch.bool, 3, 1)}
    stored = write(tmp_path / "ours", tensors, frozenset("ac"), layout, 2)
    for path in sorted((tmp_path / "ours").iterdir()):
        intact = path.read_bytes()
        header = int.from_bytes(intact[:8], "little") + 8
        for place in range(len(intact)):
            path.write_bytes(intact[:place] + bytes([intact[place] ^ 4]) + intact[place + 1 :])
            found = []
            for reader in range(readers):
                try:
                    stored.verify_checksums(reader, readers)
                except CheckpointError as error:
                    found.append(str(error))
            assert len(found) == 1, (path.name, place)
            what = "its header is not the one" if place < header else "the checksum of [abc] is not the one"
            assert re.search(f"{path.name} is damaged: {what} that was written", found[0])
        path.write_bytes(intact)
    stored.verify_checksums(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_is_gone_or_cut_off_is_named(tmp_path, layout):
    stored = write(tmp_path / "ours", {"a": torch.randn(50, 2)}, frozenset("a"), layout, 2)
    path = max((tmp_path / "ours").iterdir())
    intact = path.read_bytes()
    for length in (0, 7, len(intact) - 1):
        path.write_bytes(intact[:length])
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged: {length} bytes instead of {len(intact)}"):
            stored.require_sizes()
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
            stored.verify_checksums(0, 1)
        with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
            list(stored.parts("a"))
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        stored.require_sizes()
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        list(stored.parts("a"))


@pytest.mark.parametrize(
    "described",
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
def test_what_is_no_description_is_refused(tmp_path, described):
    with pytest.raises((KeyError, TypeError, ValueError)):
        TensorReader(tmp_path, WEIGHTS, CheckpointLayout.sharded, 2, described)
