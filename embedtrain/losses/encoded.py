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
            return Part(self.values[start:end])
        first, count = int(self.sizes[:start].sum()), int(self.sizes[start:end].sum())
        return Part(self.values[first : first + count], self.sizes[start:end])

    def take(self, indices: Tensor, texts: NDArray[np.int64]) -> "Part":
        """These texts, whose indices are known to the host as well; differentiable."""
        if self.sizes is None:
            return Part(self.values[indices])
        rows = to_device(row_indices(torch.from_numpy(texts), self.sizes).numpy(), self.values.device)
        return Part(self.values[rows], self.sizes[texts])

    def per_row(self, values: Tensor) -> Tensor:
        """The value of each row's text: [N] to [R]."""
        if self.sizes is None:
            return values
        sizes = to_device(self.sizes, values.device)
        return values.repeat_interleave(sizes, output_size=len(self.values))

    def with_values(self, values: Tensor) -> "Part":
        """Other values of the same texts, such as their gradient."""
        return Part(values, self.sizes)


def concatenate(parts: Sequence[Part]) -> Part:
    """The texts of several parts, one after the other; at least one part."""
    values = torch.cat([part.values for part in parts])
    sizes = [part.sizes for part in parts if part.sizes is not None]
    return Part(values, np.concatenate(sizes) if sizes else None)


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


def split_queries(
    parts: Sequence[Tensor], sizes: Sequence[NDArray[np.int64] | None], num_queries: int
) -> tuple[Encoded, Encoded]:
    """The queries, which are the first texts, and the documents, from the rows and the sizes of each part."""
    queries, documents = [], []
    for values, counts in zip(parts, sizes, strict=True):
        first = num_queries if counts is None else int(counts[:num_queries].sum())
        queries.append(Part(values[:first], None if counts is None else counts[:num_queries]))
        documents.append(Part(values[first:], None if counts is None else counts[num_queries:]))
    return Encoded(tuple(queries)), Encoded(tuple(documents))


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
