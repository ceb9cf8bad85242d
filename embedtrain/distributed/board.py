"""What ranks tell one another beside all collectives, over the store they met by: signs of life, and what failed."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's sign of life.

    Attributes:
        count: beats so far.
        number: notes made so far, see `Note`.
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
        speaker: the rank that says it.
        code: what every rank ends with.
        hanging: ranks that do not answer; they say where they were, once they can.
    """

    text: str
    speaker: int
    code: int = 1
    hanging: tuple[int, ...] = ()


class Board:
    """Where beats and the first failure are read and written; any thread may.

    Once the store has failed it is left alone: torch prints a trace each time.

    Args:
        store: a connection that no collective uses.
        rank: this one.
        size: how many there are.
        speaks_alone: whether this rank speaks where the store is gone and nothing can be agreed on.
    """

    def __init__(self, store: Store, rank: int, size: int, *, speaks_alone: bool) -> None:
        self._store, self.rank, self._speaks_alone = store, rank, speaks_alone
        self._others = [other for other in range(size) if other != rank]
        self._is_gone = False

    def publish(self, beat: Beat) -> None:
        """Replace this rank's beat."""
        self._ask(lambda store: store.set(f"beat/{self.rank}", json.dumps(asdict(beat))))

    def answers(self) -> bool:
        """Whether the store is there: one question, however many ranks there are."""
        return self._ask(lambda store: store.check(["failure"])) is not None

    def beats(self) -> dict[int, Beat] | None:
        """The other ranks' latest; None where the store is gone."""

        def read(store: Store) -> dict[int, Beat]:
            there = [rank for rank in self._others if store.check([f"beat/{rank}"])]
            texts = store.multi_get([f"beat/{rank}" for rank in there]) if there else []
            return {rank: Beat(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}

        return self._ask(read)

    def failure(self) -> Failure | None:
        """The first failure, if there is one."""
        return self._ask(lambda store: _failure_of(store.get("failure")) if store.check(["failure"]) else None)

    def claim(self, failure: Failure) -> Failure:
        """Publish a failure, unless there is one; the one that counts."""
        text = json.dumps(asdict(failure))
        counts = self._ask(lambda store: _failure_of(store.compare_set("failure", "", text)))
        return counts or (failure if self._speaks_alone else replace(failure, speaker=-1))

    def _ask(self, ask: Callable[[Store], Answer]) -> Answer | None:
        if not self._is_gone:
            try:
                return ask(self._store)
            except RuntimeError:
                self._is_gone = True
        return None


def _failure_of(text: bytes) -> Failure:
    values = json.loads(text)
    return Failure(**values | {"hanging": tuple(values["hanging"])})
