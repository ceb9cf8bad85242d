"""What an encoder computes of texts: one or several parts, each with one or more rows per text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One representation of N texts: a vector of each, the vectors of their tokens, or the score of each pair."""

    values: Tensor  # float32 or float64 [R, D], the rows of all texts, text by text
    sizes: NDArray[np.int64] | None = None  # [N], rows of each text, in host memory; None: one row each
    ids: Tensor | None = None  # int64 [R], the token of each row, if texts are compared by their tokens as well

    def __len__(self) -> int:
        """N."""
        return len(self.values) if self.sizes is None else len(self.sizes)

    @property
    def max_size(self) -> int:
        """The most rows of one text."""
        return 1 if self.sizes is None else int(self.sizes.max(initial=1))

    def slice(self, start: int, end: int) -> "Part":
        """The texts from `start` to `end`."""
        if self.sizes is None:
            return Part(self.values[start:end], None, None if self.ids is None else self.ids[start:end])
        first, count = int(self.sizes[:start].sum()), int(self.sizes[start:end].sum())
        ids = None if self.ids is None else self.ids[first : first + count]
        return Part(self.values[first : first + count], self.sizes[start:end], ids)

    def take(self, indices: Tensor, texts: NDArray[np.int64]) -> "Part":
        """These texts, whose indices are known to the host as well; differentiable."""
        rows = indices
        if self.sizes is not None:
            rows = to_device(row_indices(torch.from_numpy(texts), self.sizes), self.values.device)
        ids = None if self.ids is None else self.ids[rows]
        return Part(self.values[rows], None if self.sizes is None else self.sizes[texts], ids)

    def per_row(self, values: Tensor) -> Tensor:
        """The value of each row's text: [N] to [R]."""
        if self.sizes is None:
            return values
        sizes = to_device(self.sizes, values.device)
        return values.repeat_interleave(sizes, output_size=len(self.values))

    def one_row_each(self) -> "Part | None":
        """The same texts if each has one row, which needs no sizes; None if a text has several."""
        return Part(self.values, None, self.ids) if self.sizes is None or (self.sizes == 1).all() else None

    def with_values(self, values: Tensor) -> "Part":
        """Other values of the same texts, such as their gradient."""
        return Part(values, self.sizes, self.ids)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Part":
        """The same texts on a device, with values of another type."""
        return Part(self.values.to(device, dtype), self.sizes, None if self.ids is None else self.ids.to(device))


def concatenate(parts: Sequence[Part]) -> Part:
    """The texts of several parts, one after the other; at least one part."""
    values = torch.cat([part.values for part in parts])
    sizes = [part.sizes for part in parts if part.sizes is not None]
    ids = [part.ids for part in parts if part.ids is not None]
    return Part(values, np.concatenate(sizes) if sizes else None, torch.cat(ids) if ids else None)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The representations of N texts. Most kinds of models have one part; several belong to the same texts."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, values: Tensor) -> "Encoded":
        """One part with one row per text, [N, D]."""
        return cls((Part(values),))

    @property
    def vectors(self) -> Tensor:
        """The vector of each text, [N, D], of a model with one vector per text."""
        (part,) = self.parts
        assert part.sizes is None, "only a Score compares texts with several rows each"
        return part.values


def split_queries(parts: Sequence[Part], num_queries: int) -> tuple[Encoded, Encoded]:
    """The queries, which are the first texts, and the documents."""
    queries = Encoded(tuple(part.slice(0, num_queries) for part in parts))
    return queries, Encoded(tuple(part.slice(num_queries, len(part)) for part in parts))


def to_device(array: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """A copy of host memory on `device`, which waits for nothing: other memory is copied after all queued work."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def row_indices(texts: Tensor, sizes: NDArray[np.int64] | None) -> Tensor:
    """The rows of these texts, int64 [r], from int64 [n]; `sizes` has the rows of each text, None: one each."""
    if sizes is None:
        return texts
    counts = sizes[texts.numpy()]
    ends = np.cumsum(sizes)
    starts = (ends - sizes)[texts.numpy()]
    return torch.from_numpy(np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum()))
