"""Number of rows of each source in an epoch.

Computed in fractions instead of floating point: every rank, and a run that resumes on another machine, must get the
same numbers.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from embedtrain.config.recipe import WeightMode
from embedtrain.errors import ConfigError

# Powers are rounded to this grid: much finer than a row, and coarser than the difference of `pow` between machines.
_GRID = 2**40


def rows_per_source_of_epoch(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    most: Sequence[int | None],
    kind: WeightMode,
    temperature: float,
) -> list[int]:
    """Number of rows of each source in an epoch; at least one of every source that has rows.

    With `passes` a source counts size x weight rows, with `shares` its part of as many rows as there are. A
    temperature T other than 1 divides the total of these counts anew, in shares proportional to count^(1/T) (Devlin
    et al., multilingual BERT, 2019; Raffel et al., "Exploring the Limits of Transfer Learning", 2020). Shares are
    rounded by largest remainder, so that the total is exact. No source counts or gets more rows than its `most`; what
    it would get beyond that nobody gets.

    Args:
        sizes: rows that each source has.
        weights: `weight` of each.
        most: `max_rows` of each.
        kind: what a weight says.
        temperature: `data.mixing_temperature`: above 1 small sources are seen more, below 1 less.

    Raises:
        ConfigError: a weight or a temperature that is not above 0, or `max_rows` below 1.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"data.train: weight={weight} must be above 0; leave a source out that is not to be used")
    for limit in most:
        if limit is not None and limit < 1:
            raise ConfigError(f"data.train: max_rows={limit} must be at least 1, or null for all rows")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"data.mixing_temperature={temperature} must be above 0: 1 keeps the shares as they are")
    # As the decimal that was written: 0.1 * 5 is a half only so.
    exact = [Fraction(str(weight)) for weight in weights]
    if kind == WeightMode.proportions:
        counted = [_at_most(size, limit) for size, limit in zip(sizes, most, strict=True)]
        rows = _apportion(sum(counted), [weight if size else 0 for weight, size in zip(exact, sizes, strict=True)])
    else:
        rows = [
            _at_most(max(1, math.floor(size * weight + Fraction(1, 2))), limit) if size else 0
            for size, weight, limit in zip(sizes, exact, most, strict=True)
        ]
    if temperature != 1.0 and any(rows):
        largest = max(rows)
        powers = [(count / largest) ** (1.0 / temperature) for count in rows]
        shares = [max(1, round(power * _GRID)) if count else 0 for power, count in zip(powers, rows, strict=True)]
        rows = _apportion(sum(rows), shares)
    return [_at_most(count, limit) for count, limit in zip(rows, most, strict=True)]


def _at_most(rows: int, limit: int | None) -> int:
    return rows if limit is None else min(rows, limit)


def _apportion(total: int, shares: Sequence[Fraction | int]) -> list[int]:
    """Integers in these proportions whose sum is `total`; at least 1 where a share is positive.

    `total` is at least the number of positive shares.
    """
    parts = [0] * len(shares)
    left = {index: Fraction(share) for index, share in enumerate(shares) if share > 0}
    # A part below one is raised to one and the others divide the rest, which may bring further parts below one.
    while left:
        rate = total / sum(left.values())
        small = [index for index, share in left.items() if share * rate < 1]
        for index in small:
            parts[index] = 1
            del left[index]
        total -= len(small)
        if not small:
            break
    if left:
        quotas = {index: share * rate for index, share in left.items()}
        floors = {index: math.floor(quota) for index, quota in quotas.items()}
        by_remainder = sorted(left, key=lambda index: (floors[index] - quotas[index], index))
        for index in by_remainder[: total - sum(floors.values())]:
            floors[index] += 1
        for index, count in floors.items():
            parts[index] = count
    return parts
