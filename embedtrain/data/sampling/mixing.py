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
    max_rows: Sequence[int | None],
    mode: WeightMode,
    temperature: float,
) -> list[int]:
    """Number of rows of each source in an epoch; at least one of every source that has rows.

    With the mode `epochs` a source has size x weight rows, with `proportions` its part of the total number of rows. A
    temperature T other than 1 divides the total of these counts again, in proportion to count^(1/T) (Devlin et al.,
    multilingual BERT, 2019; Raffel et al., "Exploring the Limits of Transfer Learning", 2020): above 1 small sources
    are seen more, below 1 less. Proportions are rounded by largest remainder, so that the total is exact. No source
    counts or gets more than `max_rows`; what it would get beyond that is not given to others.

    Raises:
        ConfigError: a weight or a temperature that is not above 0, or `max_rows` below 1.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"data.train: weight={weight} must be above 0; leave out a source that is not to be used")
    for limit in max_rows:
        if limit is not None and limit < 1:
            raise ConfigError(f"data.train: max_rows={limit} must be at least 1, or null for all rows")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"data.mixing_temperature={temperature} must be above 0: 1 keeps the shares as they are")
    # As the decimal that was written: 0.1 * 5 is a half only so.
    exact = [Fraction(str(weight)) for weight in weights]
    if mode == WeightMode.proportions:
        counted = [_at_most(size, limit) for size, limit in zip(sizes, max_rows, strict=True)]
        rows = _apportion(sum(counted), [weight if size else 0 for weight, size in zip(exact, sizes, strict=True)])
    else:
        rows = [
            _at_most(max(1, math.floor(size * weight + Fraction(1, 2))), limit) if size else 0
            for size, weight, limit in zip(sizes, exact, max_rows, strict=True)
        ]
    if temperature != 1.0 and any(rows):
        largest = max(rows)
        powers = [(count / largest) ** (1.0 / temperature) for count in rows]
        weighted = [max(1, round(power * _GRID)) if count else 0 for power, count in zip(powers, rows, strict=True)]
        rows = _apportion(sum(rows), weighted)
    return [_at_most(count, limit) for count, limit in zip(rows, max_rows, strict=True)]


def _at_most(rows: int, limit: int | None) -> int:
    return rows if limit is None else min(rows, limit)


def _apportion(total: int, proportions: Sequence[Fraction | int]) -> list[int]:
    """Integers in these proportions with the sum `total`, at least 1 where a proportion is positive."""
    parts = [0] * len(proportions)
    left = {index: Fraction(proportion) for index, proportion in enumerate(proportions) if proportion > 0}
    # A part below one is raised to one and the others divide the rest, which may bring further parts below one.
    while left:
        rate = total / sum(left.values())
        small = [index for index, proportion in left.items() if proportion * rate < 1]
        for index in small:
            parts[index] = 1
            del left[index]
        total -= len(small)
        if not small:
            break
    if left:
        quotas = {index: proportion * rate for index, proportion in left.items()}
        floors = {index: math.floor(quota) for index, quota in quotas.items()}
        by_remainder = sorted(left, key=lambda index: (floors[index] - quotas[index], index))
        for index in by_remainder[: total - sum(floors.values())]:
            floors[index] += 1
        for index, count in floors.items():
            parts[index] = count
    return parts
