"""Batches prepared ahead of their use by threads: copies of arrays release the interpreter's lock."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from embedtrain.training.rank_batch import RankBatch


class Prefetcher:
    """The batches of steps `start` to `stop` - 1, in order.

    Args:
        make: step -> this rank's batch of that step; a function of the step alone.
        workers: threads; 0 makes each batch when it is requested.
        ahead: batches that are prepared in advance, at least one per thread.
    """

    def __init__(
        self, make: Callable[[int], RankBatch], start: int, stop: int, *, workers: int = 1, ahead: int = 2
    ) -> None:
        self._make, self._start, self._stop = make, start, stop
        self._workers, self._ahead = workers, max(workers, ahead)
        self._waited = 0.0

    def pop_wait_seconds(self) -> float:
        """Seconds spent waiting for batches since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def __iter__(self) -> Generator[RankBatch, None, None]:
        return self._synchronous() if self._workers == 0 else self._in_advance()

    def _synchronous(self) -> Generator[RankBatch, None, None]:
        for step in range(self._start, self._stop):
            start = time.perf_counter()
            batch = self._make(step)
            self._waited += time.perf_counter() - start
            yield batch

    def _in_advance(self) -> Generator[RankBatch, None, None]:
        with ThreadPoolExecutor(max_workers=self._workers, thread_name_prefix="batches") as pool:
            queue: list[Future[RankBatch]] = []
            try:
                for step in range(self._start, self._stop):
                    while len(queue) <= self._ahead and step + len(queue) < self._stop:
                        queue.append(pool.submit(self._make, step + len(queue)))
                    start = time.perf_counter()
                    batch = queue.pop(0).result()
                    self._waited += time.perf_counter() - start
                    yield batch
            finally:
                for future in queue:
                    future.cancel()
