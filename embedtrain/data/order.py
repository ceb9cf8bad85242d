"""The global order of training rows: which rows batch k holds is a function of (seed, k) alone."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from embedtrain.errors import ConfigError


class BatchPlan:
    """Which rows of the table make up each global batch, for ever: batch k is known without batches before it.

    Neither ranks nor history enter, so a run that is stopped and started again on another number of ranks
    sees the same batches. In an epoch a source of weight w has each of its rows floor(w) times, and what is
    left of w as a random part of its rows, another one each epoch. No row is dropped and none is carried
    over: the last batch of an epoch may be smaller.

    Args:
        source_sizes: rows of each source; rows are numbered through, source after source.
        weights: how often the rows of each source are seen in an epoch.
        global_batch_size: rows of a batch over all ranks.
        seed: the run's seed.

    Raises:
        ConfigError: a weight that is negative or not finite, a batch size below 1, or an epoch without rows.
    """

    def __init__(
        self, source_sizes: Sequence[int], weights: Sequence[float], global_batch_size: int, seed: int
    ) -> None:
        for weight in weights:
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"data.train: weight={weight} must be a number from 0: 2 is twice an epoch, 0.5 half")
        if global_batch_size < 1:
            raise ConfigError(f"train.global_batch_size={global_batch_size} must be at least 1")
        self.source_sizes = list(source_sizes)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._starts = np.cumsum([0, *source_sizes])
        self._times = [int(weight) for weight in weights]
        # Rounded once, here, so that every epoch has the same number of rows and of steps.
        self._extra = [
            int((weight - int(weight)) * size + 0.5) for weight, size in zip(weights, source_sizes, strict=True)
        ]
        self.rows_per_epoch = sum(
            times * size + extra for times, size, extra in zip(self._times, source_sizes, self._extra, strict=True)
        )
        if self.rows_per_epoch == 0:
            raise ConfigError("data.train: an epoch holds no rows: raise a source's weight")
        self.steps_per_epoch = -(-self.rows_per_epoch // global_batch_size)
        # One value, replaced as a whole: a thread that prepares batches may ask at the same time as another.
        self._known: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def total_steps(self, steps: int | None, epochs: float | None) -> int:
        """Steps of a run that is to last `steps` steps or `epochs` epochs; a part of a step counts as a whole one.

        Raises:
            ConfigError: neither is given, or both, or one that is not above 0.
        """
        if (steps is None) == (epochs is None):
            raise ConfigError(f"train.steps={steps} and train.epochs={epochs}: give one of the two")
        # As a decimal fraction, since 1.1 * 10 is a little above 11 in floating point.
        total = steps if epochs is None else math.ceil(Fraction(str(epochs)) * self.steps_per_epoch)
        if total is None or total < 1:
            raise ConfigError(f"train.steps={steps}, train.epochs={epochs}: a run lasts at least one step")
        return total

    def indices(self, k: int) -> NDArray[np.int64]:
        """Row numbers of batch k, counted from 0: int64 [B], B the global batch size or less at an epoch's end."""
        epoch, step = divmod(k, self.steps_per_epoch)
        known, order = self._known
        if known != epoch:
            order = self._order_of(epoch)
            self._known = (epoch, order)
        return order[step * self.global_batch_size : (step + 1) * self.global_batch_size].copy()

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        """Rows of an epoch, int64 [rows_per_epoch], in order.

        Every copy of a row gets a random place in [0, 1), and the places are sorted. A row's c-th copy of n
        falls into the c-th n-th of the epoch, so that copies of a row do not meet in one batch but where two
        such parts touch. Sorting random numbers rather than `Generator.permutation`: NumPy keeps the stream
        of `random` over its versions, but not the way it shuffles (NEP 19), and a resumed run needs both alike.
        """
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        rows, places = [], []
        for start, size, times, extra in zip(self._starts, self.source_sizes, self._times, self._extra, strict=False):
            copies = np.full(size, times, dtype=np.int64)
            copies[np.argsort(random.random(size), kind="stable")[:extra]] += 1
            repeated = np.repeat(np.arange(size), copies)
            copy = np.arange(len(repeated)) - np.repeat(np.cumsum(copies) - copies, copies)
            rows.append(start + repeated)
            places.append((copy + random.random(len(repeated))) / copies[repeated])
        return np.concatenate(rows)[np.argsort(np.concatenate(places), kind="stable")].astype(np.int64)
