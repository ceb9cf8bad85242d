"""TIES merging: Yadav et al., 2023, https://arxiv.org/abs/2306.01708.

Of each model's difference from the base, the largest values of a tensor are kept; in each position the sign with the
larger sum is elected, and the mean of the values with that sign is added to the base.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from embedtrain.commands.merge.combine import Progress, all_pieces, one_thread
from embedtrain.commands.merge.members import Member
from embedtrain.commands.merge.stored_weights import Piece
from embedtrain.distributed.world import World

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
