"""Asks a language model on all ranks: each request once, and no more than the budget allows."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.commands.synthesize.store import FOLDER, AnswerLog, Backend, Task, Work
from embedtrain.commands.synthesize.types import (
    Answer,
    Estimate,
    Refusal,
    RefusalReason,
    Reply,
    Request,
    WriterBackend,
    WriterConfig,
)
from embedtrain.distributed.signals import StopSignals, exit_code
from embedtrain.distributed.watchdog.watchdog import activity, set_activity
from embedtrain.errors import EmbedtrainError, Stopped

if TYPE_CHECKING:
    from embedtrain.distributed.world import World

Progress = Callable[[str, int, int], None]
_REPLY_TYPES = (Answer, Refusal, RefusalReason)
_REPLIES_PER_MESSAGE = 1024  # that ranks exchange at a time
# Seconds after which ranks compare what they have spent, if nothing happens before; shorter where one waits for it.
_TICK, _TICK_OF_BUDGET = 1.0, 0.1
_ASKING = "asking the language model"
# An attempt that waits for its share of the budget: the first position of its tasks, the rank, the number there, how
# many tasks, and their tokens. The order is that in which they are granted.
_Want = tuple[int, int, int, int, int]


@dataclass
class AnswerStore:
    """The answers of an output directory, and the budget of all requests that are sent for it."""

    log: AnswerLog
    world: "World"
    max_requests: int | None
    max_tokens: int | None

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget."""
        return self.max_requests is not None or self.max_tokens is not None

    def fits(self, requests: int, tokens: int) -> bool:
        """Whether the budget has as much."""
        within_requests = self.max_requests is None or requests <= self.max_requests
        return within_requests and (self.max_tokens is None or tokens <= self.max_tokens)

    def usage(self) -> dict[str, Any]:
        """Requests and tokens that all runs have spent, and what each model has answered. A collective."""
        models: dict[str, dict[str, int]] = {}
        ranks = self.world.gather((self.log.requests, self.log.tokens, self.log.usage))
        for _, _, usage in ranks:
            for model, numbers in usage.items():
                total = models.setdefault(model, dict.fromkeys(("answers", "prompt_tokens", "completion_tokens"), 0))
                for name, number in zip(total, numbers, strict=True):
                    total[name] += number
        requests, tokens = (sum(column) for column in list(zip(*ranks, strict=True))[:2])
        return {"requests": requests, "tokens": tokens, "models": dict(sorted(models.items()))}


@contextlib.contextmanager
def open_answers(
    output_dir: Path, world: "World", *, max_requests: int | None = None, max_tokens: int | None = None
) -> Iterator[AnswerStore]:
    """Open the answers of an output directory. A collective.

    A ConfigError if another command writes there.
    """
    log: AnswerLog | None = None
    try:
        with world.fail_together("opening the answers"):
            log = AnswerLog(output_dir / FOLDER, world.rank, world.size)
        assert log is not None
        yield AnswerStore(log, world, max_requests, max_tokens)
    finally:
        if log is not None:
            log.close()


class StoredAsker:
    """A language model whose answers are kept: an `Asker`."""

    def __init__(
        self,
        backend: Backend,
        answers: AnswerStore,
        writer: WriterConfig,
        *,
        signals: StopSignals | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._backend, self._answers, self._price = backend, answers, writer.price
        self._signals, self._progress = signals, progress
        self._world, self._log = answers.world, answers.log
        self.name, self.where = backend.name, backend.where

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """See `Asker.ask`. Raises Stopped if a signal ends it, after the requests in flight."""
        keys, positions, owners = self._owners(requests)
        had_answers = bool(owners) or any(self._world.gather(bool(self._log.usage.get(self.name))))
        distinct = [requests[position] for position in positions]
        groups = [
            [Task(positions[i], keys[positions[i]], distinct[i], positions[i] in owners) for i in group]
            for group in self._backend.groups(distinct)
        ]
        asked = [group for group in groups if not all(task.is_known for task in group)]
        for index, group in enumerate(asked):
            for task in group:
                owners.setdefault(task.position, index % self._backend.workers)
        own = asked[self._world.rank :: self._backend.workers] if self._world.rank < self._backend.workers else []
        work = Work(own, self._log, self.name, is_limited=self._answers.is_limited, had_answers=had_answers)
        if asked:
            self._run(work, len(positions))
        replies = self._exchange(work, keys, positions, owners)
        first = {keys[position]: position for position in positions}
        return [replies[first[key]] for key in keys]

    def estimate(self, requests: Sequence[Request]) -> Estimate:
        """See `Asker.estimate`."""
        _, positions, owners = self._owners(requests)
        missing = [requests[position] for position in positions if position not in owners]
        prompts = 0
        with self._world.fail_together("counting tokens"):
            prompts = sum(map(self._backend.prompt_tokens, missing[self._world.rank :: self._world.size]))
        read, written = sum(self._world.gather(prompts)), sum(request.max_new_tokens for request in missing)
        return Estimate(len(missing), len(owners), read, written, self._cost(read, written))

    def usage(self) -> dict[str, Any]:
        """`AnswerStore.usage`, with what this model has cost. A collective."""
        usage = self._answers.usage()
        own = usage["models"].get(self.name, {"prompt_tokens": 0, "completion_tokens": 0})
        return {**usage, "price": self._cost(own["prompt_tokens"], own["completion_tokens"])}

    def _cost(self, read: int, written: int) -> float:
        return (read * self._price.input + written * self._price.output) / 1e6

    @property
    def _has_price(self) -> bool:
        return bool(self._price.input or self._price.output)

    def _owners(self, requests: Sequence[Request]) -> tuple[list[str], list[int], dict[int, int]]:
        """The key of each request, the positions of distinct ones, and by position a rank that has its reply."""
        keys = [request.key(self.name) for request in requests]
        positions = sorted({key: index for index, key in reversed(list(enumerate(keys)))}.values())
        held = self._world.gather([position for position in positions if keys[position] in self._log])
        owners = {position: rank for rank in reversed(range(self._world.size)) for position in held[rank]}
        return keys, positions, owners

    def _run(self, work: Work, total: int) -> None:
        """Have the backend ask, while the ranks agree on what may be spent. A collective."""
        received = 0
        known = total - sum(self._world.gather(len(work.tasks)))
        deferred: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._signals is not None:
            self._signals.awaited = "the requests in flight"
            deferred = self._signals.deferred()
        with activity(_ASKING), deferred:
            threading.Thread(target=work.run, args=(self._backend,), name=_ASKING, daemon=True).start()
            received, answered = self._supervise(work, known, total)
            if received and self._signals is not None:
                self._signals.agreed = self._signals.is_stopping = True
        with self._world.fail_together(_ASKING):
            if work.error is not None:
                raise work.error
            if answered or work.had_answers:
                work.keep_refusals()
            elif work.first_refusal is not None:
                raise EmbedtrainError(f"{self.name} has answered no request: {work.first_refusal}")
        if received:
            stop = signal.Signals(received)
            raise Stopped(
                f"stopped by {stop.name}: the same command continues, and asks nothing twice", exit_code(stop)
            )

    def _supervise(self, work: Work, known: int, total: int) -> tuple[int, int]:
        """Grant attempts until all ranks are done; returns the signal that stopped them, or 0, and the new answers."""
        wants: list[_Want] = []  # the same on all ranks
        received = 0
        while True:
            work.wake.wait(_TICK_OF_BUDGET if wants else _TICK)
            work.wake.clear()
            set_activity(_ASKING)
            stop = 0 if self._signals is None or self._signals.received is None else int(self._signals.received)
            usage = self._log.usage.get(self.name, [0, 0, 0])[1:]
            states = self._world.gather({**work.state(), "signal": stop, "usage": usage})
            received = received or next((state["signal"] for state in states if state["signal"]), 0)
            if self._progress is not None:
                price = self._cost(
                    *(sum(numbers) for numbers in zip(*(state["usage"] for state in states), strict=True))
                )
                text = f"asking {self.name}" + (f", {price:.2f} spent" if self._has_price else "")
                self._progress(text, known + sum(state["replied"] for state in states), total)
            if all(state["done"] for state in states):
                return received, sum(state["answered"] for state in states)
            if received or any(state["failed"] for state in states):
                work.stop()
                wants = []
                continue
            for rank, state in enumerate(states):
                flat = iter(state["wants"])
                columns = zip(flat, flat, flat, flat, strict=True)
                wants += [(position, rank, number, count, tokens) for position, number, count, tokens in columns]
            wants.sort()
            wants = self._grant(wants, states, work)

    def _grant(self, wants: list[_Want], states: Sequence[Mapping[str, Any]], work: Work) -> list[_Want]:
        """Grant attempts in the order of the requests, as far as the budget goes; returns those that have to wait.

        One that does not fit waits as long as others are in flight, which may need less than the most that they can.
        So which requests are asked depends on neither the number of ranks nor how fast they are.
        """
        requests, tokens, in_flight = (
            sum(state[name] for state in states) for name in ("requests", "tokens", "in_flight")
        )
        for index, (_, rank, number, count, needed) in enumerate(wants):
            is_granted = self._answers.fits(requests + count, tokens + needed)
            if is_granted:
                requests, tokens, in_flight = requests + count, tokens + needed, in_flight + count
            elif in_flight and self._answers.fits(requests + count, 0):
                return wants[index:]
            if rank == self._world.rank:
                work.decide(number, is_granted=is_granted)
        return []

    def _exchange(
        self, work: Work, keys: Sequence[str], positions: Sequence[int], owners: Mapping[int, int]
    ) -> dict[int, Reply]:
        """The replies of all ranks, by position. A collective."""
        replies: dict[int, Reply] = {}
        for start in range(0, len(positions), _REPLIES_PER_MESSAGE):
            own: dict[int, Reply] = {}
            with self._world.fail_together("reading the answers"):
                for position in positions[start : start + _REPLIES_PER_MESSAGE]:
                    if owners[position] == self._world.rank:
                        new = work.replies.get(position)
                        own[position] = self._log.reply(keys[position]) if new is None else new
            for of_rank in self._world.gather(own, *_REPLY_TYPES):
                replies |= of_rank
        return replies


def open_asker(
    writer: WriterConfig,
    answers: AnswerStore,
    *,
    option: str = "writer",
    signals: StopSignals | None = None,
    progress: Progress | None = None,
) -> StoredAsker:
    """A language model that answers into `answers`; `option` is its name in errors. A collective.

    Args:
        signals: of the process. One that arrives while requests are in flight ends the command after these.
        progress: called on each rank with what is done, the requests that have a reply, and all requests.

    Raises ConfigError if the environment has no key, and ModelError if the model cannot be opened.
    """
    backend: Backend
    if writer.backend is WriterBackend.api:
        from embedtrain.commands.synthesize.api import ApiBackend

        with answers.world.fail_together("opening the language model"):
            backend = ApiBackend(writer, answers.world, option)
    else:
        from embedtrain.commands.synthesize.local import LocalBackend

        backend = LocalBackend(writer, answers.world, option)
    return StoredAsker(backend, answers, writer, signals=signals, progress=progress)
