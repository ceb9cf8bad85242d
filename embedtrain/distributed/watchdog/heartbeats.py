"""Heartbeats and the first failure, exchanged over the rendezvous store instead of collectives."""

import json
import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from embedtrain.distributed.monitor import start_monitor

Answer = TypeVar("Answer")

# Seconds to wait for a reply. The store itself waits until TCP gives up on an unreachable host: a quarter of an hour.
_REPLY_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's sign of life."""

    count: int  # heartbeats so far
    activity_number: int
    activity: str
    step: int | None  # optimizer step
    seconds: float  # duration of the activity so far
    exit_state: str  # how the rank left; empty while it runs


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run ends."""

    text: str
    reporting_rank: int  # the rank that prints it
    code: int = 1  # exit code of every rank
    hanging: tuple[int, ...] = ()  # ranks that do not respond; they print their stack once they can
    resumes: bool = False  # whether the message ends with where the run would resume


class HeartbeatStore:
    """Reads and writes heartbeats and the first failure over its own connection; may be used from any thread.

    After the store has failed it is not used again, because torch prints a trace each time. While a reply is
    outstanding no further request is sent; the reply arrives when the network recovers. A rank that `reports_alone`
    prints a failure that ranks cannot agree on because the store is lost. `has_ended` returns True if the process that
    hosts the store is known to have ended.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, reports_alone: bool, has_ended: Callable[[], bool] = bool
    ) -> None:
        self._has_ended = has_ended
        self._store, self.rank, self._reports_alone = store, rank, reports_alone
        self._other_ranks = [other for other in range(size) if other != rank]
        self.is_lost = False
        self._overdue: Future[object] | None = None
        self._requests: queue.SimpleQueue[tuple[Callable[[Store], object], Future[object]]] = queue.SimpleQueue()
        start_monitor("heartbeat-store", self._serve_requests)

    @property
    def is_unresponsive(self) -> bool:
        """Whether a reply is overdue: the store's host is unreachable or very slow."""
        return self._overdue is not None and not self._overdue.done()

    def publish(self, heartbeat: Heartbeat) -> None:
        """Replace this rank's heartbeat."""
        self._request(lambda store: store.set(f"heartbeat/{self.rank}", json.dumps(asdict(heartbeat))))

    def heartbeats(self) -> dict[int, Heartbeat] | None:
        """The latest heartbeat of every other rank; None if the store is lost or unresponsive."""

        def read(store: Store) -> dict[int, Heartbeat]:
            ranks = [rank for rank in self._other_ranks if store.check([f"heartbeat/{rank}"])]
            texts = store.multi_get([f"heartbeat/{rank}" for rank in ranks]) if ranks else []
            return {rank: Heartbeat(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

        return self._request(read)

    def failure(self) -> Failure | None:
        """The first published failure, if any."""
        return self._request(lambda store: _parse_failure(store.get("failure")) if store.check(["failure"]) else None)

    def claim_failure(self, failure: Failure) -> Failure:
        """Publish a failure unless one is published already; return the one that counts."""
        text = json.dumps(asdict(failure))
        first = self._request(lambda store: _parse_failure(store.compare_set("failure", "", text)))
        return first or (failure if self._reports_alone else replace(failure, reporting_rank=-1))

    def _request(self, request: Callable[[Store], Answer]) -> Answer | None:
        self.is_lost = self.is_lost or self._has_ended()
        if self.is_lost or self.is_unresponsive:
            return None
        answer: Future[Answer] = Future()
        self._requests.put((request, answer))  # type: ignore[arg-type]
        try:
            return answer.result(_REPLY_TIMEOUT)
        except TimeoutError:
            self._overdue = answer  # type: ignore[assignment]
        except RuntimeError:
            self.is_lost = True
        return None

    def _serve_requests(self) -> None:
        while True:
            request, answer = self._requests.get()
            try:
                answer.set_result(request(self._store))
            except Exception as error:
                answer.set_exception(error)


def _parse_failure(text: bytes) -> Failure:
    values = json.loads(text)
    return Failure(**values | {"hanging": tuple(values["hanging"])})
