"""Combines the weights of models piece by piece: coefficients, inner products, TIES, then the merged rows.

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
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.checkpoint.tensor_files import TensorSpec, bytes_of
from embedtrain.commands.merge.members import Member, Piece, pieces_of_rank, shown_name, split_pieces
from embedtrain.commands.merge.options import MergeMethod, MergeOptions, SlerpOrder, SlerpScope
from embedtrain.config.validation import written
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.weights import WeightRows
from embedtrain.utils.files import checksum, checksum_of

Matrix = NDArray[np.float64]
# Above this cosine, and between tensors that are 0, slerp is linear: the sine of the angle has no digits left.
_PARALLEL = 1 - 1e-7
_MAX_ITERATIONS, _TOLERANCE = 100, 1e-9


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights with the sum 1."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def slerp_coefficients(gram: Matrix, weights: Sequence[float], order: SlerpOrder) -> list[float]:
    """Coefficients of the spherical interpolation of models with the Gram matrix [N, N].

    Of two models with weights 1 - t and t: (sin((1 - t) a) x_0 + sin(t a) x_1) / sin a, with the angle a between them.
    The vectors themselves are interpolated, not their directions. Weights of 0 leave models out exactly.
    """
    used = [index for index, weight in enumerate(weights) if weight]
    if len(used) > 2 and order is SlerpOrder.karcher:
        return _karcher(gram, normalized(weights))
    result = np.zeros(len(weights))
    result[used[0]] = 1.0
    total = weights[used[0]]
    for index in used[1:]:
        total += weights[index]
        other = np.zeros(len(weights))
        other[index] = 1.0
        first, second = _pair(gram, result, other, weights[index] / total)
        result = first * result + second * other
    return [float(value) for value in result]


def _pair(gram: Matrix, a: Matrix, b: Matrix, t: float) -> tuple[float, float]:
    """Factors of two combinations of the models."""
    product, norm = float(a @ gram @ b), math.sqrt(max(0.0, float(a @ gram @ a) * float(b @ gram @ b)))
    cosine = product / norm if norm else 1.0
    if not abs(cosine) <= _PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def _karcher(gram: Matrix, weights: Sequence[float]) -> list[float]:
    """The point of the sphere with the least weighted sum of squared angles, times the weighted mean norm.

    It is the fixed point of m -> exp_m(sum_i w_i log_m(u_i)), with the directions u_i of the models.
    """
    norms = np.sqrt(np.maximum(0.0, np.diag(gram)))
    if not norms.all():
        return list(weights)
    directions = gram / np.outer(norms, norms)
    shares = np.array(weights)
    mean = shares.copy()  # in terms of the directions
    for _ in range(_MAX_ITERATIONS):
        length = math.sqrt(max(0.0, float(mean @ directions @ mean)))
        if length < _TOLERANCE:
            return list(weights)  # opposite directions have no mean
        mean = mean / length
        cosines = np.clip(directions @ mean, -1.0, 1.0)
        angles = np.arccos(cosines)
        sines = np.sin(angles)
        # log_m(u) = angle / sin(angle) x (u - cos(angle) m), whose limit at angle 0 is u - m.
        factors = np.where(sines > _TOLERANCE, angles / np.maximum(sines, _TOLERANCE), 1.0) * shares
        tangent = factors - float(factors @ cosines) * mean
        step = math.sqrt(max(0.0, float(tangent @ directions @ tangent)))
        if step < _TOLERANCE:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
    return [float(value) for value in mean * float(shares @ norms) / norms]


def with_base(weights: Sequence[float], scale: float) -> list[float]:
    """Coefficients of models, and of their base at the end: base + scale x sum_i w_i (x_i - base)."""
    return [*(scale * weight for weight in weights), 1 - scale * math.fsum(weights)]


def cosine_and_distance(gram: Matrix, first: int, second: int) -> tuple[float, float]:
    """Of two models."""
    norms = math.sqrt(float(gram[first, first]) * float(gram[second, second]))
    squared = float(gram[first, first] + gram[second, second] - 2 * gram[first, second])
    return (float(gram[first, second]) / norms if norms else 1.0), math.sqrt(max(0.0, squared))


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


_LOW_BITS = 16  # of a float32


def difference(member: Member, base: Member, piece: Piece) -> Tensor:
    """Rows of a model minus those of the base, in float64."""
    own, of_base = (model.tensors[piece.name].rows(piece.start, piece.end).double() for model in (member, base))
    return own.sub_(of_base)


def thresholds(
    members: Sequence[Member], base: Member, density: float, world: World, progress: Progress
) -> dict[str, list[float]]:
    """Of each tensor and model, the magnitude from which on differences are kept. A collective.

    It is the k-th largest of K values, with k = `density` x K rounded, at least 1, in float32. It is found by counting
    values, first by the upper half of their bits and then by the lower, so no tensor is in memory.
    """
    by_name: dict[str, list[Piece]] = {}
    for piece in all_pieces([*members, base]):
        if base.specs[piece.name].dtype.is_floating_point:
            by_name.setdefault(piece.name, []).append(piece)
    largest_first = sorted(by_name, key=lambda name: (-base.specs[name].num_bytes, name))
    local_names = largest_first[world.rank :: world.size]
    local_thresholds: list[tuple[str, list[float]]] = []
    with world.fail_together("finding the largest differences"), one_thread():
        for number, name in enumerate(local_names):
            progress("finding the largest differences", number, len(local_names))
            local_thresholds.append((name, [_threshold(member, base, by_name[name], density) for member in members]))
    return {name: values for of_rank in world.gather(local_thresholds) for name, values in of_rank}


def _threshold(member: Member, base: Member, pieces: Sequence[Piece], density: float) -> float:
    spec = base.specs[pieces[0].name]
    values = max(1, spec.num_bytes // spec.dtype.itemsize)
    rank = max(1, round(density * values))  # from the largest
    upper, rank = _bin_of_rank(member, base, pieces, rank, None)
    lower, _ = _bin_of_rank(member, base, pieces, rank, upper)
    return float(torch.tensor((upper << _LOW_BITS) | lower, dtype=torch.int32).view(torch.float32))


def _bin_of_rank(
    member: Member, base: Member, pieces: Sequence[Piece], rank: int, upper: int | None
) -> tuple[int, int]:
    """The bin of the `rank`-th largest magnitude, and its rank within the bin.

    Bins are the upper bits of magnitudes, or the lower bits of those with the upper bits `upper`.
    """
    counts = torch.zeros(1 << _LOW_BITS, dtype=torch.int64)
    for piece in pieces:
        bits = _magnitude(difference(member, base, piece)).flatten().view(torch.int32)
        high = bits >> _LOW_BITS
        chosen = high if upper is None else bits[high == upper] & ((1 << _LOW_BITS) - 1)
        counts += torch.bincount(chosen, minlength=1 << _LOW_BITS)
    above = counts.flip(0).cumsum(0)
    position = int(torch.searchsorted(above, rank))
    before = int(above[position - 1]) if position else 0
    return len(counts) - 1 - position, rank - before


def _magnitude(differences: Tensor) -> Tensor:
    return differences.abs().float()


def ties_rows(
    members: Sequence[Member],
    base: Member,
    piece: Piece,
    weights: Sequence[float],
    kept: Mapping[str, Sequence[float]],
    scale: float,
) -> Tensor:
    """Merged rows in float64: base + `scale` x the weighted mean of the differences whose sign is elected."""
    of_base = base.tensors[piece.name].rows(piece.start, piece.end).double()
    trimmed = []
    for member, weight, threshold in zip(members, weights, kept[piece.name], strict=True):
        change = difference(member, base, piece)
        change *= _magnitude(change) >= threshold
        trimmed.append(change.mul_(weight))
    elected = sum(trimmed[1:], trimmed[0].clone()).sign()
    total, divisor = torch.zeros_like(of_base), torch.zeros_like(of_base)
    for change, weight in zip(trimmed, weights, strict=True):
        agrees = (change.sign() == elected) & (change != 0)
        total += change * agrees
        divisor += weight * agrees
    return of_base.add_(total.div_(divisor.masked_fill_(divisor == 0, 1.0)).mul_(scale))
