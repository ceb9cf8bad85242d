"""The tensors of a checkpoint: in which file which rows lie, when they are written and when they are read.

    sharded   weights-00000-of-00002.safetensors, weights-00001-of-00002.safetensors: a file a shard, with its rows of
              every tensor; what is not cut lies in the first
    full      weights.safetensors: whole tensors, each rank having written its rows in place

and the same of `optimizer`. All of it follows from types, shapes and the number of shards, so that any number of ranks
finds any rows, and whoever exports needs no ranks at all.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from embedtrain.checkpoint.snapshot import LocalShard, ShardPosition
from embedtrain.checkpoint.weight_files import (
    DTYPE_NAMES,
    DTYPES_BY_NAME,
    FileLayout,
    RowWriter,
    TensorSpec,
    checksum_of,
    file_layout,
    read_blocks,
)
from embedtrain.config.recipe import CheckpointLayout
from embedtrain.errors import CheckpointError


@dataclass(frozen=True)
class TensorFiles:
    """How tensors of one kind lie in files.

    Attributes:
        kind: `weights` or `optimizer`: how file names begin.
        layout: a file a shard, or one of all.
        shards: into how many parts rows are cut, as `torch.chunk` cuts.
        specs: of whole tensors.
        cut: names of those that are cut; the others belong to the first shard.
    """

    kind: str
    layout: CheckpointLayout
    shards: int
    specs: Mapping[str, TensorSpec]
    cut: frozenset[str]

    def bounds(self, name: str, shard: int) -> tuple[int, int]:
        """The rows [start, end) of a tensor that a shard has."""
        rows = self.specs[name].num_rows
        if name not in self.cut:
            return (0, rows) if shard == 0 else (0, 0)
        part = -(-rows // self.shards)
        return min(part * shard, rows), min(part * (shard + 1), rows)

    def shard_file(self, shard: int) -> str:
        """Name of the file that has this shard's rows."""
        if self.layout is CheckpointLayout.full:
            return f"{self.kind}.safetensors"
        return f"{self.kind}-{shard:05d}-of-{self.shards:05d}.safetensors"

    def shard_layout(self, shard: int) -> FileLayout:
        """What the file that has this shard's rows looks like."""
        return self.files[self.shard_file(shard)]

    @cached_property
    def files(self) -> dict[str, FileLayout]:
        """Every file by name."""
        if self.layout is CheckpointLayout.full:
            return {self.shard_file(0): file_layout(self.specs)}
        return {self.shard_file(shard): file_layout(self._specs_of(shard)) for shard in range(self.shards)}

    def place(self, name: str, shard: int) -> tuple[str, int, int]:
        """File, first byte and number of bytes of a shard's rows of a tensor."""
        start, end = self.bounds(name, shard)
        row_bytes = self.specs[name].row_bytes
        before = start * row_bytes if self.layout is CheckpointLayout.full else 0
        offset = self.shard_layout(shard).offsets.get(name, 0) + before
        return self.shard_file(shard), offset, (end - start) * row_bytes

    def tensor_shards(self, name: str) -> range:
        """The shards that have a part of a tensor, be it of no rows."""
        return range(self.shards if name in self.cut else 1)

    def _specs_of(self, shard: int) -> dict[str, TensorSpec]:
        found = {}
        for name, spec in self.specs.items():
            start, end = self.bounds(name, shard)
            if end > start:
                found[name] = spec.rows(end - start)
        return found


def tensor_files(kind: str, parts: Mapping[str, LocalShard], layout: CheckpointLayout, shards: int) -> TensorFiles:
    """How the tensors of a snapshot will lie; the same on every rank."""
    cut = frozenset(name for name, part in parts.items() if part.cut)
    return TensorFiles(kind, layout, shards, {name: part.spec for name, part in parts.items()}, cut)


def write_local_shards(
    folder: Path, files: TensorFiles, share: ShardPosition, parts: Mapping[str, LocalShard]
) -> dict[str, int]:
    """Write what this rank holds; the CRC-32 of its rows by name of the tensor.

    Raises:
        OSError: the folder cannot be written.
    """
    written: dict[str, int] = {}
    mine = {name: part for name, part in parts.items() if part.cut or share.shard == 0}
    if not share.writes:
        return written
    begins = files.layout is CheckpointLayout.sharded or share.shard == 0
    with RowWriter(folder / files.shard_file(share.shard), files.shard_layout(share.shard), begins=begins) as file:
        for name, part in mine.items():
            if part.rows.numel():
                first = part.first if files.layout is CheckpointLayout.full else 0
                written[name] = file.write(name, part.rows.cpu(), first)
            else:
                written[name] = 0
    return written


def describe_tensors(files: TensorFiles, checksums: list[Mapping[str, int]]) -> dict[str, Any]:
    """For the manifest: type, shape and checksums of every tensor.

    Args:
        files: how they lie.
        checksums: of each shard, by name.
    """
    return {
        name: {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "crc32": [checksums[shard][name] for shard in files.tensor_shards(name)],
        }
        for name, spec in files.specs.items()
    }


class TensorReader:
    """Tensors of one kind in a step folder, read by rows. A context manager: files stay open inside.

    Args:
        folder: the step folder.
        kind: `weights` or `optimizer`.
        layout: how they were written.
        shards: by how many.
        described: what `describe_tensors` returned.

    Raises:
        KeyError, TypeError, ValueError: the description is not one.
    """

    def __init__(
        self, folder: Path, kind: str, layout: CheckpointLayout, shards: int, described: Mapping[str, Any]
    ) -> None:
        specs = {
            name: TensorSpec(DTYPES_BY_NAME[facts["dtype"]], tuple(_count(length) for length in facts["shape"]))
            for name, facts in described.items()
        }
        self.checksums = {name: [int(value) for value in facts["crc32"]] for name, facts in described.items()}
        cut = frozenset(name for name, values in self.checksums.items() if len(values) > 1)
        if any(len(values) not in (1, shards) for values in self.checksums.values()):
            raise ValueError(f"checksums of another number of shards than {shards}")
        self.folder = folder
        self.files = TensorFiles(kind, layout, shards, specs, cut)
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Type and shape of every whole tensor."""
        return self.files.specs

    def rows(self, name: str, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Rows [start, end) of a tensor, part by part as they lie: first row and values.

        Raises:
            CheckpointError: a file is not what it should be.
        """
        for shard in self.files.tensor_shards(name):
            first, last = self.files.bounds(name, shard)
            low, high = max(start, first), min(end, last)
            if low >= high:
                continue
            file, _, _ = self.files.place(name, shard)
            offset = 0 if self.files.layout is CheckpointLayout.full else first
            try:
                found = self._file(file)
                if not self.specs[name].shape:
                    yield 0, found.get_tensor(name)
                else:
                    yield low, found.get_slice(name)[low - offset : high - offset]
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from None

    def parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A whole tensor, part by part as it lies: first row and values."""
        yield from self.rows(name, 0, self.specs[name].num_rows)

    def require_sizes(self) -> None:
        """Compare sizes of files.

        Raises:
            CheckpointError: a file is missing or has another size.
        """
        for file, layout in self.files.files.items():
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if path.stat().st_size != layout.size:
                raise CheckpointError(f"{path} is damaged: {path.stat().st_size} bytes instead of {layout.size}")

    def verify_checksums(self, part: int, parts: int) -> None:
        """Compare checksums of every `parts`-th piece, so that ranks share the reading.

        Raises:
            CheckpointError: a file's content is not what was written.
        """
        for file, layout in list(self.files.files.items())[part::parts]:
            path = self.folder / file
            if b"".join(read_blocks(path, 0, len(layout.header))) != layout.header:
                raise CheckpointError(f"{path} is damaged: its header is not the one that was written")
        pieces = [(name, shard) for name in self.specs for shard in self.files.tensor_shards(name)]
        for name, shard in pieces[part::parts]:
            file, offset, size = self.files.place(name, shard)
            if size and checksum_of(read_blocks(self.folder / file, offset, size)) != self.checksums[name][shard]:
                raise CheckpointError(
                    f"{self.folder / file} is damaged: the checksum of {name} is not the one that was written"
                )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
        return self._open[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.clear()
        self._stack.close()


def _count(length: Any) -> int:
    if not isinstance(length, int) or length < 0:
        raise ValueError(f"{length} is no length")
    return length
