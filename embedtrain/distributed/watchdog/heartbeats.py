"""What ranks tell one another beside all collectives, over the store they met by: signs of life, and what failed."""

import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

Answer = TypeVar("Answer")

# Seconds that an answer is waited for. The store itself waits for as long as TCP sends again to a host that is out of
# reach, which is a quarter of an hour.
_WITHIN = 5.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's sign of life.

    Attributes:
        count: beats so far.
        number: notes made so far, see `Activity`.
        what: it does.
        step: the optimiser step.
        seconds: for how long it has been doing it.
        left: how it left; empty while it is there.
    """

    count: int
    number: int
    what: str
    step: int | None
    seconds: float
    left: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run ends.

    Attributes:
        text: one sentence for the user.
        reporting_rank: the rank that says it.
        code: what every rank ends with.
        hanging: ranks that do not answer; they say where they were, once they can.
    """

    text: str
    reporting_rank: int
    code: int = 1
    hanging: tuple[int, ...] = ()


class HeartbeatStore:
    """Where beats and the first failure are read and written; any thread may.

    Once the store has failed it is left alone: torch prints a trace each time. While it does not answer nothing more is
    asked; a cable that is put back has the answer come.

    Args:
        store: a connection that no collective uses.
        rank: this one.
        size: how many there are.
        reports_alone: whether this rank speaks where the store is gone and nothing can be agreed on.

    Attributes:
        is_lost: whether the store has failed, for good.
    """

    def __init__(self, store: Store, rank: int, size: int, *, reports_alone: bool) -> None:
        self._store, self.rank, self._speaks_alone = store, rank, reports_alone
        self._others = [other for other in range(size) if other != rank]
        self.is_lost = False
        self._late: Future[object] | None = None  # asked, and not answered in time
        self._asked: queue.SimpleQueue[tuple[Callable[[Store], object], Future[object]]] = queue.SimpleQueue()
        threading.Thread(target=self._ask_one_by_one, name="board", daemon=True).start()

    @property
    def is_unresponsive(self) -> bool:
        """Whether the store is waited for: its host is out of reach, or very slow."""
        return self._late is not None and not self._late.done()

    def publish(self, beat: Heartbeat) -> None:
        """Replace this rank's beat."""
        self._ask(lambda store: store.set(f"beat/{self.rank}", json.dumps(asdict(beat))))

    def heartbeats(self) -> dict[int, Heartbeat] | None:
        """The other ranks' latest; None where the store is gone or silent."""

        def read(store: Store) -> dict[int, Heartbeat]:
            there = [rank for rank in self._others if store.check([f"beat/{rank}"])]
            texts = store.multi_get([f"beat/{rank}" for rank in there]) if there else []
            return {rank: Heartbeat(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}

        return self._ask(read)

    def failure(self) -> Failure | None:
        """The first failure, if there is one."""
        return self._ask(lambda store: _failure_of(store.get("failure")) if store.check(["failure"]) else None)

    def claim_failure(self, failure: Failure) -> Failure:
        """Publish a failure, unless there is one; the one that counts."""
        text = json.dumps(asdict(failure))
        counts = self._ask(lambda store: _failure_of(store.compare_set("failure", "", text)))
        return counts or (failure if self._speaks_alone else replace(failure, reporting_rank=-1))

    def _ask(self, ask: Callable[[Store], Answer]) -> Answer | None:
        if self.is_lost or self.is_unresponsive:
            return None
        answer: Future[Answer] = Future()
        self._asked.put((ask, answer))  # type: ignore[arg-type]
        try:
            return answer.result(_WITHIN)
        except TimeoutError:
            self._late = answer  # type: ignore[assignment]
        except RuntimeError:
            self.is_lost = True
        return None

    def _ask_one_by_one(self) -> None:
        while True:
            ask, answer = self._asked.get()
            try:
                answer.set_result(ask(self._store))
            except Exception as error:
                answer.set_exception(error)


def _failure_of(text: bytes) -> Failure:
    values = json.loads(text)
    return Failure(**values | {"hanging": tuple(values["hanging"])})
