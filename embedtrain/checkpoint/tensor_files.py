"""The tensors of a checkpoint: which file holds which rows, writing this rank's rows, reading any rows.

    sharded   weights-00000-of-00002.safetensors, weights-00001-of-00002.safetensors: one file per shard with its rows
              of every tensor; tensors that are not sharded are in the first
    full      weights.safetensors: unsharded tensors; each rank writes its rows in place

and the same for `optimizer`. The layout follows from types, shapes and the number of shards, so that any number of
ranks can locate any rows, and an export needs no ranks at all.
"""

import contextlib
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from embedtrain.config.recipe import CheckpointLayout
from embedtrain.errors import CheckpointError
from embedtrain.utils.files import reading

# Type names of the format, in the order in which the library writes them: wide types first, so that every tensor starts
# at a multiple of its item size.
DTYPE_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: index for index, dtype in enumerate(DTYPE_NAMES)}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Bytes that are checksummed and written at a time, while they are in the CPU cache.
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of an unsharded tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The spec of a tensor; of the unsharded tensor if it is a DTensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def num_rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * torch.Size(self.shape[1:]).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.row_bytes

    def rows(self, count: int) -> "TensorSpec":
        """The same spec with another number of rows."""
        return TensorSpec(self.dtype, (count, *self.shape[1:])) if self.shape else self


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Header of a file, offset of each tensor, and size of the file, in bytes."""

    specs: Mapping[str, TensorSpec]
    header: bytes
    offsets: Mapping[str, int]
    size: int


def file_layout(specs: Mapping[str, TensorSpec]) -> FileLayout:
    """The layout that the safetensors library gives a file of these tensors; their order does not matter."""
    names = sorted(specs, key=lambda name: (_ORDER[specs[name].dtype], name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in names:
        spec = specs[name]
        starts[name], end = end, end + spec.num_bytes
        offsets = [starts[name], end]
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + start for name, start in starts.items()}
    return FileLayout(dict(specs), header, starts, len(header) + end)


class RowWriter:
    """One of the writers of a file. As a context manager it flushes the file to disk at the end.

    Other processes may write the file at the same time with the same layout. One of the writers has to write the
    header, which also sets the size of the file.
    """

    def __init__(self, path: Path, layout: FileLayout, *, writes_header: bool) -> None:
        self._layout = layout
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if writes_header:
            _write_at(self._descriptor, memoryview(layout.header), 0)
            os.ftruncate(self._descriptor, layout.size)

    def write(self, name: str, rows: Tensor, first: int = 0) -> int:
        """Write rows in host memory, the whole tensor if it is a scalar; returns their CRC-32.

        `first` is the index of the first row in the unsharded tensor.
        """
        spec = self._layout.specs[name]
        assert rows.dtype == spec.dtype, f"{name} has the type {spec.dtype} in the layout, not {rows.dtype}"
        return _write_at(self._descriptor, bytes_of(rows), self._layout.offsets[name] + first * spec.row_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory; copies only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum_of(blocks: Iterable[memoryview]) -> int:
    """CRC-32 of a sequence of blocks."""
    value = 0
    for block in blocks:
        value = zlib.crc32(block, value)
    return value


def read_blocks(path: Path, offset: int, size: int) -> Iterable[memoryview]:
    """The bytes [offset, offset + size) of a file, block by block."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size > 0:
            block = file.read(min(size, _BLOCK))
            if not block:
                return
            size -= len(block)
            yield memoryview(block)


def _write_at(descriptor: int, content: memoryview, offset: int) -> int:
    """Write at an offset, in as many calls as needed; returns the CRC-32 of the content."""
    value = 0
    for start in range(0, len(content), _BLOCK):
        block = content[start : start + _BLOCK]
        value = zlib.crc32(block, value)
        while block:
            written = os.pwrite(descriptor, block, offset)
            offset, block = offset + written, block[written:]
    return value


_MAX_ELEMENTS = 1 << 50  # of a tensor: no machine holds as many


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's rows of one tensor."""

    spec: TensorSpec  # of the unsharded tensor
    rows: Tensor  # on any device; the whole tensor if it is not sharded
    first_row: int  # index of the first of `rows` in the unsharded tensor
    sharded: bool  # whether ranks hold different rows


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Position of this rank in the mesh: shard `shard` of `num_shards`, in replica `replica`."""

    replica: int
    shard: int
    num_shards: int

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes: one replica does."""
        return self.replica == 0


@dataclass(frozen=True)
class TensorFiles:
    """The files of all tensors of one kind."""

    kind: str  # `weights` or `optimizer`, the prefix of file names
    layout: CheckpointLayout
    num_shards: int  # rows are divided as by `torch.chunk`
    specs: Mapping[str, TensorSpec]  # of the unsharded tensors
    sharded: frozenset[str]  # names; the other tensors belong to the first shard

    def row_bounds(self, name: str, shard: int) -> tuple[int, int]:
        """Rows [start, end) of a tensor in a shard."""
        rows = self.specs[name].num_rows
        if name not in self.sharded:
            return (0, rows) if shard == 0 else (0, 0)
        size = -(-rows // self.num_shards)
        return min(size * shard, rows), min(size * (shard + 1), rows)

    def shard_file(self, shard: int) -> str:
        """Name of the file with the rows of a shard."""
        if self.layout is CheckpointLayout.full:
            return f"{self.kind}.safetensors"
        return f"{self.kind}-{shard:05d}-of-{self.num_shards:05d}.safetensors"

    def shard_layout(self, shard: int) -> FileLayout:
        """Layout of the file with the rows of a shard."""
        shard = 0 if self.layout is CheckpointLayout.full else shard
        if shard not in self._layouts:
            self._layouts[shard] = self._make_layout(shard)
        return self._layouts[shard]

    @cached_property
    def files(self) -> dict[str, FileLayout]:
        """Layout of every file, by name. A rank that writes needs only its own, from `shard_layout`."""
        shards = range(1 if self.layout is CheckpointLayout.full else self.num_shards)
        return {self.shard_file(shard): self.shard_layout(shard) for shard in shards}

    def byte_range(self, name: str, shard: int) -> tuple[str, int, int]:
        """File, offset and number of bytes of the rows of a tensor in a shard."""
        start, end = self.row_bounds(name, shard)
        row_bytes = self.specs[name].row_bytes
        preceding = start * row_bytes if self.layout is CheckpointLayout.full else 0
        offset = self.shard_layout(shard).offsets.get(name, 0) + preceding
        return self.shard_file(shard), offset, (end - start) * row_bytes

    def tensor_shards(self, name: str) -> range:
        """The shards of a tensor, including those without rows."""
        return range(self.num_shards if name in self.sharded else 1)

    def _make_layout(self, shard: int) -> FileLayout:
        if self.layout is CheckpointLayout.full:
            return file_layout(self.specs)
        # Few of many shards differ in their numbers of rows.
        rows, sizes = self._rows
        counts = np.clip(rows - sizes * shard, 0, np.where(sizes, sizes, rows if shard == 0 else 0))
        known = self._layouts_by_rows
        if (key := counts.tobytes()) not in known:
            parts = zip(self.specs.items(), counts.tolist(), strict=True)
            known[key] = file_layout({name: spec.rows(count) for (name, spec), count in parts if count})
        return known[key]

    @cached_property
    def _rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows of each tensor, and those of its parts but the last ones; 0 if it is not sharded."""
        rows = np.array([spec.num_rows for spec in self.specs.values()], dtype=np.int64)
        is_sharded = np.array([name in self.sharded for name in self.specs], dtype=np.bool_)
        return rows, np.where(is_sharded, -(-rows // self.num_shards), 0)

    @cached_property
    def _layouts(self) -> dict[int, FileLayout]:
        return {}

    @cached_property
    def _layouts_by_rows(self) -> dict[bytes, FileLayout]:
        return {}


def tensor_files(kind: str, shards: Mapping[str, LocalShard], layout: CheckpointLayout, num_shards: int) -> TensorFiles:
    """The files for the tensors of a snapshot; the same on every rank."""
    sharded = frozenset(name for name, shard in shards.items() if shard.sharded)
    return TensorFiles(kind, layout, num_shards, {name: shard.spec for name, shard in shards.items()}, sharded)


def write_local_shards(
    folder: Path, files: TensorFiles, position: ShardPosition, shards: Mapping[str, LocalShard]
) -> NDArray[np.int64]:
    """Write this rank's rows; returns the CRC-32 of those of each tensor, in the order of `files.specs`."""
    checksums = dict.fromkeys(files.specs, 0)
    if not position.is_writer:
        return np.empty(0, dtype=np.int64)
    local = {name: shard for name, shard in shards.items() if shard.sharded or position.shard == 0}
    writes_header = files.layout is CheckpointLayout.sharded or position.shard == 0
    path, layout = folder / files.shard_file(position.shard), files.shard_layout(position.shard)
    with RowWriter(path, layout, writes_header=writes_header) as file:
        for name, shard in local.items():
            if shard.rows.numel():
                first = shard.first_row if files.layout is CheckpointLayout.full else 0
                checksums[name] = file.write(name, shard.rows.cpu(), first)
    # An array: the ranks gather those of all of them.
    return np.array(list(checksums.values()), dtype=np.int64)


def describe_tensors(files: TensorFiles, checksums: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    """Type, shape and checksums of every tensor, for the manifest; `checksums` are those of each shard."""
    by_tensor = np.stack(checksums, axis=1).tolist()
    return {
        name: {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "crc32": of_shards[: len(files.tensor_shards(name))],
        }
        for (name, spec), of_shards in zip(files.specs.items(), by_tensor, strict=True)
    }


class TensorReader:
    """Reads tensors of one kind by rows. As a context manager it keeps files open.

    `description` is the result of `describe_tensors`; KeyError, TypeError or ValueError if it is malformed.
    """

    def __init__(
        self, folder: Path, kind: str, layout: CheckpointLayout, num_shards: int, description: Mapping[str, Any]
    ) -> None:
        specs = {
            name: TensorSpec(DTYPES_BY_NAME[entry["dtype"]], _shape(entry["shape"]))
            for name, entry in description.items()
        }
        self.checksums = {name: [int(value) for value in entry["crc32"]] for name, entry in description.items()}
        sharded = frozenset(name for name, values in self.checksums.items() if len(values) > 1)
        if any(len(values) not in (1, num_shards) for values in self.checksums.values()):
            raise ValueError(f"the number of checksums is not the number of shards, {num_shards}")
        # Every shard has a file: a number of shards without files would take time and memory to lay out.
        if num_shards < 1 or (layout is CheckpointLayout.sharded and num_shards > len(os.listdir(folder))):
            raise ValueError(f"{num_shards} is not the number of shards")
        self.folder = folder
        self.files = TensorFiles(kind, layout, num_shards, specs, sharded)
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Type and shape of every unsharded tensor."""
        return self.files.specs

    def rows(self, name: str, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Rows [start, end) of a tensor, one stored shard at a time: index of the first row, and rows.

        Raises CheckpointError if a file cannot be read.
        """
        for shard in self.files.tensor_shards(name):
            first, last = self.files.row_bounds(name, shard)
            low, high = max(start, first), min(end, last)
            if low >= high:
                continue
            file, _, _ = self.files.byte_range(name, shard)
            offset = 0 if self.files.layout is CheckpointLayout.full else first
            try:
                tensors = self._file(file)
                if not self.specs[name].shape:
                    yield 0, tensors.get_tensor(name)
                else:
                    yield low, tensors.get_slice(name)[low - offset : high - offset]
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from None

    def all_rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """All rows of a tensor, one stored shard at a time: index of the first row, and rows."""
        yield from self.rows(name, 0, self.specs[name].num_rows)

    def require_sizes(self) -> None:
        """Raise CheckpointError if a file is missing or has another size."""
        for file, layout in self.files.files.items():
            path, status = self.folder / file, None
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), reading(path):
                status = path.stat()
            if status is None or not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is missing")
            if status.st_size != layout.size:
                raise CheckpointError(f"{path} is damaged: {status.st_size} bytes instead of {layout.size}")

    def verify_checksums(self, rank: int, world_size: int) -> None:
        """Verify every `world_size`-th checksum, so that the ranks share the reading.

        Raises CheckpointError if the content of a file has changed, UnreadableError if it cannot be read.
        """
        for file, layout in list(self.files.files.items())[rank::world_size]:
            path = self.folder / file
            with reading(path):
                header = b"".join(read_blocks(path, 0, len(layout.header)))
            if header != layout.header:
                raise CheckpointError(f"{path} is damaged: its header has changed")
        shards = [(name, shard) for name in self.specs for shard in self.files.tensor_shards(name)]
        for name, shard in shards[rank::world_size]:
            file, offset, size = self.files.byte_range(name, shard)
            path = self.folder / file
            with reading(path):
                is_intact = not size or checksum_of(read_blocks(path, offset, size)) == self.checksums[name][shard]
            if not is_intact:
                raise CheckpointError(f"{path} is damaged: the checksum of {name} does not match")

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
        return self._open[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.clear()
        self._stack.close()


def require_fit(folder: Path, model: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> None:
    """Raise CheckpointError if a checkpoint's tensors do not have the names and shapes of the model's."""
    for name in sorted(model.keys() ^ specs.keys()):
        missing = "checkpoint" if name in model else "model"
        raise CheckpointError(f"{folder} does not fit this model: {name} is missing in the {missing}")
    for name, spec in specs.items():
        if tuple(model[name].shape) != spec.shape:
            raise CheckpointError(
                f"{folder} does not fit this model: {name} has the shape {list(spec.shape)}, the model expects "
                f"{list(model[name].shape)}"
            )


def _shape(values: Any) -> tuple[int, ...]:
    shape = tuple(values)
    if any(not isinstance(length, int) or not 0 <= length < _MAX_ELEMENTS for length in shape):
        raise ValueError(f"{values} is not a shape")
    if math.prod(length or 1 for length in shape) >= _MAX_ELEMENTS:
        raise ValueError(f"{values} is the shape of a tensor that is too large")
    return shape
