"""Combines the weights of models piece by piece: inner products first, then the merged rows.

Which pieces there are follows from the tensors alone, a piece is computed by one thread of one rank, and sums over
pieces are rounded once. So the result has the same bytes at any number of ranks and threads.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embedtrain.checkpoint.tensor_files import TensorSpec, bytes_of
from embedtrain.commands.merge.coefficients import Matrix, normalized, slerp_coefficients, with_base
from embedtrain.commands.merge.compatibility import shown_name
from embedtrain.commands.merge.members import Member
from embedtrain.commands.merge.options import MergeMethod, MergeOptions, SlerpScope
from embedtrain.commands.merge.stored_weights import Piece, pieces_of_rank, split_pieces
from embedtrain.config.validation import written
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.weights import WeightRows
from embedtrain.utils.checksums import checksum, checksum_of

# Values that all models together have in memory at a time, in float64, besides a few temporary ones.
_VALUES = 1 << 20
_EMBEDDINGS, _HEADS = "embeddings", "heads"  # names of `parts`
_EMBEDDING_NAME = re.compile(r"embed|\bwte\b|\bwpe\b")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Measures:
    """Of the weights of all models.

    Attributes:
        grams: inner products [N, N] of each tensor, by name; without those of integers.
        total: of all weights together.
        digests: of each model: names, types, shapes and values of all weights, whatever files they are in.
    """

    grams: Mapping[str, Matrix]
    total: Matrix
    digests: list[str]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums that do not depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def all_pieces(members: Sequence[Member]) -> list[Piece]:
    """Pieces of all tensors, the same on every rank."""
    return split_pieces(members[0].specs, max(1 << 14, _VALUES // len(members)))


def combined_tensors(members: Sequence[Member], combine: Callable[[Piece], Tensor]) -> dict[str, Tensor]:
    """All combined tensors in memory, float32: of adapters, which are small."""
    parts: dict[str, list[Tensor]] = {}
    for piece in all_pieces(members):
        parts.setdefault(piece.name, []).append(combine(piece).float())
    return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}


def measure(members: Sequence[Member], world: World, progress: Progress) -> Measures:
    """Inner products and digests of all models' weights. A collective.

    Raises ModelError for values that are not finite, and for integers that differ between models.
    """
    pieces = all_pieces(members)
    products: list[list[float]] = []
    digests: list[list[str]] = []
    with world.fail_together("comparing the weights"), one_thread():
        own = list(pieces_of_rank(pieces, members[0].specs, world.rank, world.size))
        for number, piece in enumerate(own):
            progress("comparing the weights", number, len(own))
            rows = [member.tensors[piece.name].rows(piece.start, piece.end) for member in members]
            digests.append([checksum(bytes(bytes_of(part))) for part in rows])
            products.append(_products(members, piece, rows))
    all_products = [row for of_rank in world.gather(products) for row in of_rank]
    all_digests = [row for of_rank in world.gather(digests) for row in of_rank]
    by_name: dict[str, list[list[float]]] = {}
    for piece, row in zip(pieces, all_products, strict=True):
        if row:
            by_name.setdefault(piece.name, []).append(row)
    size = len(members)
    grams = {name: _matrix(rows, size) for name, rows in by_name.items()}
    total = _matrix([row for rows in by_name.values() for row in rows], size)
    of_members = [
        checksum_of([_described(member), [row[index] for row in all_digests]]) for index, member in enumerate(members)
    ]
    return Measures(grams, total, of_members)


def _described(member: Member) -> dict[str, list[object]]:
    return {name: [str(spec.dtype), *spec.shape] for name, spec in member.specs.items()}


def _products(members: Sequence[Member], piece: Piece, rows: Sequence[Tensor]) -> list[float]:
    """The upper triangle of the inner products of a piece; empty for integers."""
    if not rows[0].dtype.is_floating_point:
        for member, part in zip(members, rows, strict=True):
            if not torch.equal(part, rows[0]):
                raise ModelError(
                    f"{member.name} cannot be merged with {members[0].name}: the integers of {shown_name(piece.name)} "
                    "differ"
                )
        return []
    values = [part.double() for part in rows]
    products = [
        float((values[first] * values[second]).sum())
        for first in range(len(rows))
        for second in range(first, len(rows))
    ]
    if not math.isfinite(math.fsum(products)):
        for member, part in zip(members, rows, strict=True):
            if not bool(part.isfinite().all()):
                raise ModelError(f"{member.name}: values of {shown_name(piece.name)} are not finite")
    return products


def _matrix(rows: Sequence[Sequence[float]], size: int) -> Matrix:
    sums = [math.fsum(column) for column in zip(*rows, strict=True)]
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size)] = sums
    return matrix + np.triu(matrix, 1).T


class Coefficients:
    """The coefficients of all models in each tensor; of methods with a base, the last model is the base.

    Raises ConfigError if `parts` has a pattern that matches no tensor.
    """

    def __init__(self, options: MergeOptions, measures: Measures, weights: Sequence[float]) -> None:
        self._options, self._measures = options, measures
        self.weights = self._normalized(weights)
        self._parts = [(part.names, self._normalized(part.weights)) for part in options.parts]
        names = list(measures.grams)
        for index, part in enumerate(options.parts):
            if len(part.weights) != len(weights):
                raise ConfigError(f"parts[{index}].weights={written(part.weights)}: there are {len(weights)} models")
            if not any(_matches(part.names, name) for name in names):
                example = ", ".join(map(shown_name, names[:3]))
                raise ConfigError(f"parts[{index}].names={part.names}: matches no tensor, such as {example}")
        self._of_model: list[float] | None = None
        if options.method is MergeMethod.slerp and options.scope is SlerpScope.model:
            self._of_model = slerp_coefficients(measures.total, self.weights, options.order)

    def _normalized(self, weights: Sequence[float]) -> list[float]:
        return normalized(weights) if self._options.normalize_weights else list(weights)

    def weights_of(self, name: str) -> list[float]:
        """The weights of the models in a tensor."""
        return next((values for pattern, values in self._parts if _matches(pattern, name)), self.weights)

    def of(self, name: str) -> list[float]:
        """The coefficients of a tensor, one of each model that is read."""
        weights = self.weights_of(name)
        match self._options.method:
            case MergeMethod.linear:
                return weights
            case MergeMethod.slerp:
                if self._of_model is not None:
                    return self._of_model
                return slerp_coefficients(self._measures.grams[name], weights, self._options.order)
            case _:
                return with_base(weights, self._options.scale)


def _matches(pattern: str, name: str) -> bool:
    shown = shown_name(name)
    if pattern == _HEADS:
        return shown == name  # not of the backbone
    if pattern == _EMBEDDINGS:
        return shown != name and _EMBEDDING_NAME.search(shown) is not None
    return re.search(pattern, shown) is not None


def linear_rows(members: Sequence[Member], piece: Piece, coefficients: Sequence[float]) -> Tensor:
    """A linear combination of rows, in float64. Models with the coefficient 0 are not read."""
    result: Tensor | None = None
    for member, coefficient in zip(members, coefficients, strict=True):
        if coefficient:
            # Two operations, because a fused one rounds differently where the CPU has no vector instructions left.
            part = member.tensors[piece.name].rows(piece.start, piece.end).double().mul_(coefficient)
            result = part if result is None else result.add_(part)
    if result is None:
        spec = members[0].specs[piece.name]
        return torch.zeros((piece.end - piece.start, *spec.shape[1:]) if spec.shape else (), dtype=torch.float64)
    return result


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [...] in float64, rounded once to `dtype`.

    torch converts float64 to 16 bits by way of float32, which rounds twice. Rounding to float32 with an odd last digit
    wherever it is not exact keeps the second rounding correct.
    """
    if dtype not in (torch.bfloat16, torch.float16) or values.dtype != torch.float64:
        return values.to(dtype)
    nearest = values.float()
    error = values - nearest.double()
    bits = nearest.view(torch.int32)
    is_inexact_even = (error != 0) & (bits & 1 == 0) & nearest.isfinite()
    away_from_zero = (error > 0) == (values > 0)
    bits.add_(torch.where(away_from_zero, 1, -1).to(torch.int32) * is_inexact_even)
    return nearest.to(dtype)


def merged_rows(
    members: Sequence[Member],
    pieces: Sequence[Piece],
    combine: Callable[[Piece], Tensor],
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Iterator[WeightRows]:
    """The merged rows of these pieces, rounded to `dtype`; integers are those of the first model."""
    specs: Mapping[str, TensorSpec] = members[0].specs
    for number, piece in enumerate(pieces):
        if progress is not None:
            progress("merging", number, len(pieces))
        if not specs[piece.name].dtype.is_floating_point:
            yield piece.name, piece.start, members[0].tensors[piece.name].rows(piece.start, piece.end)
            continue
        with one_thread():
            rows = rounded(combine(piece), dtype)
        yield piece.name, piece.start, rows
