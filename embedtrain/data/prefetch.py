"""Items prepared ahead of their use by threads: tokenizers and copies of arrays release the interpreter's lock."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from embedtrain.distributed.device import thread_initializer

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """The items of the indices `start` to `stop` - 1, in order.

    Closing the iterator ends the threads.

    Args:
        make: index -> item, such as this rank's batch of a step; a function of the index alone. What it raises, the
            iterator raises at this index.
        workers: threads; 0 makes each item when it is requested.
        ahead: items that are prepared in advance, at least one per thread.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, *, workers: int = 1, ahead: int = 2) -> None:
        self._make, self._start, self._stop = make, start, stop
        self._workers, self._ahead = workers, max(workers, ahead)
        self._waited = 0.0

    def pop_wait_seconds(self) -> float:
        """Seconds spent waiting for items since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def __iter__(self) -> Generator[T, None, None]:
        return self._synchronous() if self._workers == 0 else self._in_advance()

    def _synchronous(self) -> Generator[T, None, None]:
        for index in range(self._start, self._stop):
            start = time.perf_counter()
            item = self._make(index)
            self._waited += time.perf_counter() - start
            yield item

    def _in_advance(self) -> Generator[T, None, None]:
        threads = ThreadPoolExecutor(self._workers, "prefetch", initializer=thread_initializer())
        with threads as pool:
            queue: list[Future[T]] = []
            try:
                for index in range(self._start, self._stop):
                    while len(queue) <= self._ahead and index + len(queue) < self._stop:
                        queue.append(pool.submit(self._make, index + len(queue)))
                    start = time.perf_counter()
                    item = queue.pop(0).result()
                    self._waited += time.perf_counter() - start
                    yield item
            finally:
                for future in queue:
                    future.cancel()
