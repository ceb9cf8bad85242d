"""The documents of an index on a rank: what a search asks of them, and memory for their vectors.

Vectors are in tiles, on the device, on the host, or in memory-mapped files; copies between host and device make neither
wait for the other.

Shapes: T queries, n documents of this rank, t of them in a tile, P pairs, D dimensions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorDtype, VectorPlacement
from embedtrain.distributed.device import free_memory
from embedtrain.errors import ConfigError
from embedtrain.losses.encoded import Part, to_device
from embedtrain.losses.score import Score


class DocumentTile(Protocol):
    """Some of the documents, on the device."""

    def __len__(self) -> int: ...

    def scores(self, queries: Part) -> Tensor:
        """Approximate scores, float32 [T, t]; of an exact store, int32 and exact.

        An exact score exceeds that of a tile by at most `rounding_error`, and is below it by at most `deficit`.
        """
        ...


class DocumentStore(ABC):
    """The documents of a rank, numbered from 0 in the order in which they were added.

    Attributes:
        is_exact: whether all scores are integers, int32, and those of tiles are exact.
    """

    is_exact: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """The number n of documents."""

    def viewed(self, score: Score) -> "DocumentStore":
        """The same documents, for one of the views of their score; only stores of scores with views."""
        raise NotImplementedError

    @abstractmethod
    def add(self, documents: Part) -> None:
        """Add documents."""

    @abstractmethod
    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
        """The number of each tile's first document, and the tile."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[Tensor, Part]]:
        """All documents: their numbers, int64 on the CPU, and their representations as float32 on the device."""

    @abstractmethod
    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """Scores of pairs (query, document), int64 [P] each: float32 [P], a function of the two texts alone."""

    @property
    def score_dtype(self) -> torch.dtype:
        """The type of exact scores."""
        return torch.int32 if self.is_exact else torch.float32

    @abstractmethod
    def rounding_error(self, queries: Part) -> Tensor:
        """Bound, float64 [T], on how far an exact score may be above that of a tile."""

    def deficit(self, queries: Part, documents: Tensor) -> Tensor:
        """Bound, float64 [T, C] or [T, 1], on how far an exact score may be below that of a tile.

        `documents`, int64 [T, C] or [1, C] on the device, are numbers of documents.
        """
        return self.rounding_error(queries).unsqueeze(1)

    def candidate_limit(self, k: int) -> int:
        """The candidates that a search collects for the best `k`, more than rounding makes necessary."""
        return k + 32


def require_no_copy(config: IndexConfig, kind: str) -> None:
    """Raise ConfigError for `index.scan_dtype` and a placement in files; `kind` describes the model."""
    if config.scan_dtype is not None:
        value = config.scan_dtype.value
        raise ConfigError(f"index.scan_dtype={value}: a {kind} is searched without a copy; leave it out")
    require_kept_in_memory(config, kind)


def require_kept_in_memory(config: IndexConfig, kind: str) -> None:
    """Raise ConfigError for a placement in files, which only an index of one vector per text has."""
    if config.place is VectorPlacement.disk:
        raise ConfigError(f"index.place=disk: the vectors of a {kind} are kept in memory; write auto, device or host")


# Vectors per tile: as many are on the device at a time if vectors are kept on the host.
TILE = 16384
# The same of documents with a vector per token.
TILE_ROWS = 1 << 17
# Their inner products, or numbers of gathered rows, in one block of a search: on a CPU what fits its caches.
BLOCK_NUMEL_CPU, BLOCK_NUMEL_GPU = 1 << 19, 1 << 26
# Fraction of a GPU's free memory that vectors may take before they are kept on the host.
MAX_DEVICE_FRACTION = 0.5
_DTYPES = {VectorDtype.fp32: torch.float32, VectorDtype.bf16: torch.bfloat16, VectorDtype.fp16: torch.float16}


class GrowingTensor:
    """Rows that are appended, in memory that is allocated once for about the expected number of them.

    Blocks that stay, allocated between those that are freed, would fragment the memory of the host. There, rows that
    are not written take none.
    """

    def __init__(self, expected: int, dtype: torch.dtype, device: torch.device) -> None:
        self._expected, self._dtype, self._device = expected, dtype, device
        self._memory: Tensor | None = None
        self._used = 0

    def append(self, rows: Tensor) -> None:
        """Append [m, ...]."""
        end = self._used + len(rows)
        if self._memory is None or end > len(self._memory):
            # Ranks have nearly the same number of documents.
            size = end + end // 8 if end > self._expected else self._expected + self._expected // 32 + 1
            larger = torch.empty((size, *rows.shape[1:]), dtype=self._dtype, device=self._device)
            if self._memory is not None:
                larger[: self._used] = self._memory[: self._used]
            self._memory = larger
        self._memory[self._used : end] = rows
        self._used = end

    @property
    def rows(self) -> Tensor:
        """All rows, until the next are appended; [0] before the first."""
        if self._memory is None:
            return torch.empty(0, dtype=self._dtype, device=self._device)
        return self._memory[: self._used]


class VectorTiles:
    """Vectors that are added block by block and read tile by tile on `device`, in the order in which they were added.

    `place=auto` decides by `expected`, the final number of vectors. They are kept as `dtype`, by default that of
    `config`, and read as what `decode` returns of [m, D] on the device. With `place=disk`, vectors on the CPU are kept
    as the tensors that are added, which may be memory-mapped.
    """

    def __init__(
        self,
        config: IndexConfig,
        device: torch.device,
        expected: int,
        *,
        dtype: torch.dtype | None = None,
        decode: Callable[[Tensor], Tensor] = Tensor.float,
    ) -> None:
        self._config, self._device, self._expected = config, device, expected
        self._dtype = dtype or dtype_of(config)
        self._decode = decode
        self._tiles: list[Tensor] = []  # mapped, or copied from a GPU to the host
        self._pending: list[Tensor] = []  # on their way there
        self._vectors = GrowingTensor(expected, self._dtype, device)  # all others
        self._on_host: bool | None = None
        self._last_copy: HostCopy | None = None  # of a tile to the host; earlier ones are complete if this one is

    def __len__(self) -> int:
        return sum(len(tile) for tile in (*self._tiles, *self._pending, self._vectors.rows))

    @property
    def dimension(self) -> int:
        """D; 0 before the first `add`."""
        vectors = [*self._tiles, *self._pending, self._vectors.rows]
        return max(tile.shape[-1] if len(tile) else 0 for tile in vectors)

    def add(self, vectors: Tensor) -> Tensor:
        """Add [m, D]; returns them as they are kept, on the device unless they are mapped."""
        if self._config.place is VectorPlacement.disk and vectors.device.type == "cpu":
            vectors = vectors.to(self._dtype)
            self._tiles += torch.split(vectors, TILE) if len(vectors) else []
            return vectors
        vectors = vectors.to(self._device, self._dtype)
        if self._on_host is None:
            self._on_host = self._keep_on_host(vectors.shape[1])
        if self._on_host and self._device.type == "cuda":
            self._pending.append(vectors)
            if sum(map(len, self._pending)) >= TILE:
                self._seal()
        else:
            self._vectors.append(vectors)
        return vectors

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """The index of each tile's first vector, and the tile as float32 on the device."""
        start = 0
        for group in self._groups():
            tile = group[0] if len(group) == 1 else torch.cat(group)
            yield start, self._decode(tile.to(self._device, non_blocking=True))
            start += len(tile)

    def _groups(self) -> Iterator[list[Tensor]]:
        """Consecutive tiles that are read as one: files of stored vectors may be small."""
        group: list[Tensor] = []
        for tile in self._sealed():
            if group and sum(map(len, group)) + len(tile) > TILE:
                yield group
                group = []
            group.append(tile)
        if group:
            yield group

    def pick(self, rows: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Vectors by index, [P] on the device, in batches: positions among the P, and float32 [p, D]."""
        tiles = self._sealed()
        if self._last_copy is not None:
            self._last_copy.wait()
        order = rows.argsort()
        edges = torch.tensor([0, *map(len, tiles)]).cumsum(0)
        cuts = torch.searchsorted(rows[order], to_device(edges, rows.device)).tolist()
        for tile, edge, start, stop in zip(tiles, edges.tolist(), cuts, cuts[1:], strict=False):
            for positions in torch.split(order[start:stop], batch_size) if stop > start else ():
                tile_rows = (rows[positions] - edge).to(tile.device)
                yield positions, self._decode(tile[tile_rows].to(self._device))

    def _sealed(self) -> list[Tensor]:
        """All vectors in tiles, none of them empty."""
        self._seal()
        rows = self._vectors.rows
        return [*self._tiles, *(torch.split(rows, TILE) if len(rows) else ())]

    def _seal(self) -> None:
        """Copy pending vectors to the host in whole tiles; a smaller last tile is reopened for further vectors."""
        if not self._pending:
            return
        last: list[Tensor] = []
        if self._tiles and len(self._tiles[-1]) < TILE:
            last.append(self._tiles.pop().to(self._device, non_blocking=True))
        for tile in torch.split(torch.cat([*last, *self._pending]), TILE):
            # Encoding continues during the copy; a scan reads it in the order of the device's operations.
            self._last_copy = HostCopy(tile)
            self._tiles.append(self._last_copy.tensor)
        self._pending = []

    def _keep_on_host(self, dimension: int) -> bool:
        if self._config.place is not VectorPlacement.auto or self._device.type != "cuda":
            return self._config.place in (VectorPlacement.host, VectorPlacement.disk)
        size = self._expected * dimension * self._dtype.itemsize
        return size > MAX_DEVICE_FRACTION * free_memory(self._device)


def dtype_of(config: IndexConfig) -> torch.dtype:
    """The data type in which vectors are kept."""
    return _DTYPES[config.dtype]


class HostCopy:
    """A copy of a tensor in host memory, made while the device continues to compute; a tensor on the CPU itself."""

    def __init__(self, tensor: Tensor) -> None:
        # Operations on the device after this line see the copy without `wait`: they run in the same order.
        self.tensor = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The copy, once the host may read it."""
        if self._event is not None:
            self._event.synchronize()
        return self.tensor
