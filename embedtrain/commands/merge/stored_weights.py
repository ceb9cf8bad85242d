"""Weights on disk that are read by rows with plain reads: a mapped file would count as memory of the process."""

import itertools
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embedtrain.checkpoint.tensor_files import (
    DTYPES_BY_NAME,
    RowWriter,
    TensorReader,
    TensorSpec,
    bytes_of,
    file_layout,
)
from embedtrain.errors import CheckpointError, ModelError
from embedtrain.formats.weights import WeightStream

_LENGTH = struct.Struct("<Q")  # of a safetensors header


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows [first, end) of a tensor, contiguous in a file."""

    path: Path
    offset: int  # bytes
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in one file or several, or a small one in memory."""

    spec: TensorSpec
    parts: tuple[StoredRows, ...] = ()
    value: Tensor | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Rows [start, end) in host memory; of a scalar, [0, 1) is the scalar itself.

        Raises CheckpointError if a file cannot be read, or is too short.
        """
        if self.value is not None:
            return self.value[start:end] if self.value.dim() else self.value
        rows = torch.empty((end - start, *self.spec.shape[1:]) if self.spec.shape else (), dtype=self.spec.dtype)
        buffer, row_bytes = bytes_of(rows), self.spec.row_bytes
        for part in self.parts:
            low, high = max(start, part.first), min(end, part.end)
            if low < high:
                target = buffer[(low - start) * row_bytes : (high - start) * row_bytes]
                _read_into(part.path, part.offset + (low - part.first) * row_bytes, target)
        return rows


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, end) of a tensor: what is read, combined and written at a time."""

    name: str
    start: int
    end: int


def tensors_of_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises ModelError if it is damaged, or has a type that is not supported."""
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES_BY_NAME:
                raise ModelError(f"{path}: {name} has the type {entry['dtype']}, which cannot be merged")
            spec = TensorSpec(DTYPES_BY_NAME[entry["dtype"]], tuple(entry["shape"]))
            offset = _LENGTH.size + length + entry["data_offsets"][0]
            tensors[name] = StoredTensor(spec, (StoredRows(path, offset, 0, spec.num_rows),))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
    return tensors


def tensors_of_checkpoint(reader: TensorReader, prefix: str) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint whose names have a prefix, by their names without it."""
    files, tensors = reader.files, {}
    for name, spec in reader.specs.items():
        if name.startswith(prefix):
            parts = []
            for shard in files.tensor_shards(name):
                (first, end), (file, offset, size) = files.row_bounds(name, shard), files.byte_range(name, shard)
                if size:
                    parts.append(StoredRows(reader.folder / file, offset, first, end))
            tensors[name.removeprefix(prefix)] = StoredTensor(spec, tuple(parts))
    return tensors


def write_stream(path: Path, weights: WeightStream) -> None:
    """Write weights that can only be read in order, one tensor at a time, into a safetensors file."""
    layout = file_layout(weights.specs)
    with RowWriter(path, layout, writes_header=True) as writer:
        for name, first, rows in weights.rows:
            if name in weights.specs:
                writer.write(name, rows.detach().to("cpu", weights.specs[name].dtype), first)


def split_pieces(specs: Mapping[str, TensorSpec], max_values: int) -> list[Piece]:
    """Pieces of all tensors with at most so many values each, or one row."""
    pieces = []
    for name, spec in specs.items():
        width = max(1, spec.row_bytes // spec.dtype.itemsize)
        step = max(1, max_values // width)
        bounds = itertools.chain(range(0, spec.num_rows, step), [spec.num_rows])
        pieces += [Piece(name, start, end) for start, end in itertools.pairwise(bounds)]
    return pieces


def pieces_of_rank(
    pieces: Sequence[Piece], specs: Mapping[str, TensorSpec], rank: int, world_size: int
) -> Iterator[Piece]:
    """A contiguous part of the pieces, such that each rank has about as many bytes."""
    total = sum(specs[piece.name].row_bytes * (piece.end - piece.start) for piece in pieces)
    done = 0
    for piece in pieces:
        size = specs[piece.name].row_bytes * (piece.end - piece.start)
        if min(world_size - 1, (2 * done + size) * world_size // (2 * max(1, total))) == rank:
            yield piece
        done += size


def _read_into(path: Path, offset: int, target: memoryview) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while target:
                count = file.readinto(target)
                if not count:
                    raise CheckpointError(f"{path} is damaged: it ends before byte {offset + len(target)}")
                target = target[count:]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
