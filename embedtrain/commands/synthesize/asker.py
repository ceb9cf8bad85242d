"""Asks a language model on all ranks: each request once, and no more than the budget allows."""

import contextlib
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from embedtrain.commands.synthesize.answers import AnswerLog, AnswerStore
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
    pass

Progress = Callable[[str, int, int], None]
_REPLY_TYPES = (Answer, Refusal, RefusalReason)
_REPLIES_PER_MESSAGE = 1024  # that ranks exchange at a time
# Seconds after which ranks compare what they have spent, if nothing happens before; shorter where one waits for it.
_TICK, _TICK_OF_BUDGET = 1.0, 0.1
_ASKING = "asking the language model"


@dataclass(slots=True)
class Task:
    """A request, at its position among those of a call of `ask`."""

    position: int
    key: str
    request: Request
    is_known: bool  # whether it has an answer already, or another rank asks: it is among its neighbours only


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to have a task answered, and the most tokens that it needs."""

    task: Task
    number: int
    tokens: int


class Backend(Protocol):
    """What sends requests to a language model.

    Attributes:
        name: of the model, with whatever its answers depend on.
        where: a sentence that says where documents go.
        workers: the ranks that send requests, from 0 on.
    """

    name: str
    where: str
    workers: int

    def groups(self, requests: Sequence[Request]) -> list[list[int]]:
        """Requests that one rank asks together, by their indices; a function of the requests alone."""
        ...

    def prompt_tokens(self, request: Request) -> int:
        """The tokens of a request that the model reads, about."""
        ...

    def run(self, work: "Work") -> None:
        """Ask what is to be asked of this rank; called in a thread. Returns soon when `work.is_stopping`."""
        ...


class Work:
    """What one rank asks in a call of `ask`. The thread of the backend calls the methods; the main thread grants.

    Attributes:
        groups: the tasks; of each group, those that are not known are to be asked.
        answered: requests that have an answer now.
        had_answers: whether this model has answered anything before.
        is_stopping: whether no further request may be sent.
        replies: by position.
    """

    def __init__(self, groups: list[list[Task]], log: AnswerLog, model: str, *, is_limited: bool, had_answers: bool):
        self.groups, self.had_answers, self.is_stopping, self.answered = groups, had_answers, False, 0
        self.replies: dict[int, Reply] = {}
        self.error: BaseException | None = None
        self.is_done = False
        self.wake = threading.Event()
        self._log, self._model, self._is_limited = log, model, is_limited
        self._lock = threading.Lock()
        self._refused: list[tuple[str, str]] = []
        # What is spent or granted; attempts that are granted and have not ended.
        self._requests, self._tokens, self._in_flight = log.requests, log.tokens, 0
        self._wanted: dict[int, tuple[Sequence[Task], int, Future[bool]]] = {}
        self._new: list[int] = []  # wanted, and not known to the other ranks
        self._num_wanted = 0

    @property
    def tasks(self) -> list[Task]:
        """Those that are to be asked."""
        return [task for group in self.groups for task in group if not task.is_known]

    def reserve(self, tasks: Sequence[Task], tokens: int) -> "Future[bool]":
        """Whether an attempt of each task may be sent, with at most so many tokens together; if not, each has a reply.

        Tasks that are reserved together are granted together: none of them waits for another.
        """
        result: Future[bool] = Future()
        with self._lock:
            if self.is_stopping:
                result.set_result(False)
            elif self._is_limited:
                self._num_wanted += 1
                self._wanted[self._num_wanted] = (tasks, tokens, result)
                self._new.append(self._num_wanted)
                self.wake.set()
            else:
                self._spend(len(tasks), tokens)
                result.set_result(True)
        return result

    def release(self, tasks: Sequence[Task], tokens: int) -> None:
        """Give back what was reserved, and not sent."""
        with self._lock:
            self._spend(-len(tasks), -tokens)

    def begin(self, task: Task, tokens: int) -> Attempt:
        """Write that a reserved attempt is sent now."""
        return Attempt(task, self._log.attempt(task.key, tokens), tokens)

    def answer(self, attempt: Attempt, answer: Answer, *, is_counted: bool = True) -> None:
        """Keep an answer. Without `is_counted` nobody says its tokens, and the most that it can be are spent."""
        self._log.answer(attempt.number, attempt.task.key, answer, self._model)
        self.replies[attempt.task.position] = answer
        self.answered += 1
        self.end(attempt, answer.prompt_tokens + answer.completion_tokens if is_counted else attempt.tokens)

    def end(self, attempt: Attempt, tokens: int) -> None:
        """An attempt has ended, and needed so many tokens."""
        if tokens != attempt.tokens:
            self._log.spent(attempt.number, tokens, attempt.tokens)
        with self._lock:
            self._tokens += tokens - attempt.tokens
            self._in_flight -= 1
        if self._is_limited:
            self.wake.set()

    def refuse(self, task: Task, message: str) -> None:
        """The task has no answer, for good: it is not asked again, if the model answers other requests."""
        self.replies[task.position] = Refusal(RefusalReason.refused, message)
        self._refused.append((task.key, message))

    def fail(self, task: Task, message: str) -> None:
        """The task has no answer in this run."""
        self.replies[task.position] = Refusal(RefusalReason.failed, message)

    def stop(self, error: BaseException | None = None) -> None:
        """Send no further request; attempts in flight may end. `error` is raised on all ranks then."""
        with self._lock:
            self.is_stopping, self.error = True, self.error or error
            wanted, self._wanted = self._wanted, {}
        for _, _, result in wanted.values():
            result.set_result(False)
        self.wake.set()

    # The main thread.

    def run(self, backend: Backend) -> None:
        """Run the backend in this thread."""
        try:
            if any(not task.is_known for group in self.groups for task in group):
                backend.run(self)
        except BaseException as error:
            self.stop(error)
        finally:
            self.is_done = True
            self.wake.set()

    def state(self) -> dict[str, Any]:
        """What the other ranks need to know."""
        is_done = self.is_done  # first: what it has wanted and answered before is in this state then
        with self._lock:
            new, self._new = self._new, []
            wants: list[int] = []
            for number in new:
                if number in self._wanted:
                    tasks, tokens, _ = self._wanted[number]
                    wants += [min(task.position for task in tasks), number, len(tasks), tokens]
            return {
                "requests": self._requests,
                "tokens": self._tokens,
                "in_flight": self._in_flight,
                "wants": wants,
                "answered": self.answered,
                "replied": len(self.replies),
                "done": is_done,
                "failed": self.error is not None,
            }

    def decide(self, number: int, *, is_granted: bool) -> None:
        """Grant a wanted attempt, or refuse it for the budget."""
        with self._lock:
            wanted = self._wanted.pop(number, None)
            if wanted is None:  # it has stopped meanwhile
                return
            tasks, tokens, result = wanted
            if is_granted:
                self._spend(len(tasks), tokens)
            else:
                self.replies |= {task.position: Refusal(RefusalReason.budget) for task in tasks}
        result.set_result(is_granted)

    def keep_refusals(self) -> None:
        """Write the refusals."""
        for key, message in self._refused:
            self._log.refusal(key, message)

    @property
    def first_refusal(self) -> str | None:
        """What the server said first."""
        return self._refused[0][1] if self._refused else None

    def _spend(self, requests: int, tokens: int) -> None:
        self._requests += requests
        self._tokens += tokens
        self._in_flight += requests


# An attempt that waits for its share of the budget: the first position of its tasks, the rank, the number there, how
# many tasks, and their tokens. The order is that in which they are granted.
_Want = tuple[int, int, int, int, int]


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
