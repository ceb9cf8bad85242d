"""Safetensors files with a layout that is computed before writing, so that several processes fill one concurrently.

The offset of every tensor follows from types and shapes alone, and rows of a tensor are a contiguous range of bytes.
So each rank writes its own rows in place, and no process ever holds an unsharded tensor.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

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
