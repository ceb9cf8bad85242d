"""Batches made ahead of their use, by threads: tokenisers and copies of arrays release the interpreter."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from embedtrain.training.rank_batch import RankBatch


class Prefetcher:
    """The batches of steps `start` to `stop`, in order, whichever thread made them first.

    Args:
        make: step -> this rank's batch of that step; a function of the step alone.
        stop: step behind the last.
        workers: threads; 0 makes each batch when it is asked for.
        ahead: how many batches are made before they are asked for, at least one a thread.
    """

    def __init__(
        self, make: Callable[[int], RankBatch], start: int, stop: int, *, workers: int = 1, ahead: int = 2
    ) -> None:
        self._make, self._start, self._stop = make, start, stop
        self._workers, self._ahead = workers, max(workers, ahead)
        self._waited = 0.0

    def pop_wait_seconds(self) -> float:
        """Seconds that batches were waited for since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def __iter__(self) -> Generator[RankBatch, None, None]:
        return self._at_once() if self._workers == 0 else self._ahead_of_use()

    def _at_once(self) -> Generator[RankBatch, None, None]:
        for step in range(self._start, self._stop):
            began = time.perf_counter()
            batch = self._make(step)
            self._waited += time.perf_counter() - began
            yield batch

    def _ahead_of_use(self) -> Generator[RankBatch, None, None]:
        with ThreadPoolExecutor(max_workers=self._workers, thread_name_prefix="batches") as pool:
            queue: list[Future[RankBatch]] = []
            try:
                for step in range(self._start, self._stop):
                    while len(queue) <= self._ahead and step + len(queue) < self._stop:
                        queue.append(pool.submit(self._make, step + len(queue)))
                    began = time.perf_counter()
                    batch = queue.pop(0).result()
                    self._waited += time.perf_counter() - began
                    yield batch
            finally:
                for made in queue:
                    made.cancel()
