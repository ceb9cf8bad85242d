"""A rank's vectors in tiles of one size, in the memory of its device or of the host, as fp32 or bf16.

Shapes: n vectors on this rank, D dimensions.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, Place, VectorDtype

# Vectors of a tile: what is on the device at a time where vectors are kept on the host.
TILE = 16384
# Of the free memory of a GPU, the share that vectors may take before they are kept on the host.
_SHARE_OF_DEVICE = 0.5
_DTYPES = {VectorDtype.fp32: torch.float32, VectorDtype.bf16: torch.bfloat16}


class VectorTiles:
    """Vectors that are added block by block and read tile by tile, in the order in which they came.

    Args:
        config: as what they are kept, and where.
        device: where they are read.
        expected: how many vectors there will be; what `place=auto` decides by.
    """

    def __init__(self, config: IndexConfig, device: torch.device, expected: int) -> None:
        self._config, self._device, self._expected = config, device, expected
        self._dtype = dtype_of(config)
        self._tiles: list[Tensor] = []
        self._pending: list[Tensor] = []
        self._on_host: bool | None = None

    def __len__(self) -> int:
        return sum(len(tile) for tile in (*self._tiles, *self._pending))

    @property
    def dimension(self) -> int:
        """D; 0 before anything was added."""
        held = [*self._tiles, *self._pending]
        return held[0].shape[1] if held else 0

    def add(self, vectors: Tensor) -> Tensor:
        """Keep [m, D]; what they are from now on, on the device."""
        vectors = vectors.to(self._device, self._dtype)
        if self._on_host is None:
            self._on_host = self._belongs_on_host(vectors.shape[1])
        self._pending.append(vectors)
        if sum(map(len, self._pending)) >= TILE:
            self._seal()
        return vectors

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """The number of each tile's first vector, and the tile as float32 on the device."""
        self._seal()
        start = 0
        for tile in self._tiles:
            yield start, tile.to(self._device, non_blocking=True).float()
            start += len(tile)

    def pick(self, rows: Tensor, at_a_time: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Vectors by their numbers, [P] on the device, in portions: which of the P they are, and float32 [p, D]."""
        self._seal()
        order = rows.argsort()
        edges = torch.tensor([0, *(len(tile) for tile in self._tiles)]).cumsum(0)
        cuts = torch.searchsorted(rows[order].cpu(), edges).tolist()
        for tile, edge, start, stop in zip(self._tiles, edges.tolist(), cuts, cuts[1:], strict=False):
            for of in torch.split(order[start:stop], at_a_time) if stop > start else ():
                wanted = (rows[of] - edge).to(tile.device)
                yield of, tile[wanted].to(self._device).float()

    def _seal(self) -> None:
        """Cut what was added into whole tiles; what is left over waits for more, or is the last."""
        if not self._pending:
            return
        last = [self._tiles.pop().to(self._device)] if self._tiles and len(self._tiles[-1]) < TILE else []
        for tile in torch.split(torch.cat([*last, *self._pending]), TILE):
            kept = tile.to("cpu") if self._on_host else tile.clone()
            self._tiles.append(kept.pin_memory() if self._on_host and self._device.type == "cuda" else kept)
        self._pending = []

    def _belongs_on_host(self, dimension: int) -> bool:
        if self._config.place is not Place.auto or self._device.type != "cuda":
            return self._config.place is Place.host
        free, _ = torch.cuda.mem_get_info(self._device)
        return self._expected * dimension * self._dtype.itemsize > _SHARE_OF_DEVICE * free


def dtype_of(config: IndexConfig) -> torch.dtype:
    """What vectors are kept as."""
    return _DTYPES[config.dtype]
