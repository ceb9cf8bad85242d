"""What is asked of a language model, its answers, and what they needed, in files that an interruption leaves whole.

OUTPUT_DIR/answers/00000.jsonl    attempts and replies of rank 0, in the order in which they happened

Each line has a checksum, so that the last one of a killed process, which may be cut off, is recognised. An attempt is
written before it is sent and a reply before it is used: what was spent is known after any interruption, and no answer
is asked for twice.
"""

import fcntl
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embedtrain.commands.synthesize.types import Answer, Refusal, RefusalReason, Reply, Request
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.utils.files import checksum, make_folder, open_append

FOLDER = "answers"


class AnswerLog:
    """The files of attempts and replies. Rank r of W reads every W-th file from the r-th on, and appends to the r-th.

    Attributes:
        requests: attempts so far, in the files that this rank reads.
        tokens: tokens of these: those that were read and written, or the most that it can have been if no reply says.
        usage: by model, how many answers there are, and the tokens that were read and written.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        make_folder(folder)
        self.requests = self.tokens = 0
        self.usage: dict[str, list[int]] = {}
        self._places: dict[bytes, tuple[int, int, int]] = {}  # of each reply by key: descriptor, start, length
        self._descriptors: list[int] = []
        self._last = 0  # number of the last attempt in the own file
        own = folder / f"{rank:05}.jsonl"
        self._file = open_append(own)
        try:
            _lock(self._file.fileno(), folder)
            for path in sorted(folder.glob("*.jsonl")):
                if path.stem.isdecimal() and int(path.stem) % size == rank:
                    last = self._read(path)
                    if path == own:
                        self._last, self._own = last, self._descriptors[-1]
            self._end = os.fstat(self._own).st_size
            if self._end and os.pread(self._own, 1, self._end - 1) != b"\n":
                self._append(b"\n")
        except BaseException:
            self.close()
            raise

    def __contains__(self, key: str) -> bool:
        return bytes.fromhex(key) in self._places

    def reply(self, key: str) -> Reply:
        """The reply of a key that is in the log."""
        descriptor, start, length = self._places[bytes.fromhex(key)]
        fact = _parse(os.pread(descriptor, length, start))
        if fact is None:
            raise EmbedtrainError(f"an answer in the folder {FOLDER} has changed while the command ran: start it again")
        if "refused" in fact:
            return Refusal(RefusalReason.refused, fact["message"])
        return Answer(fact["text"], fact["prompt_tokens"], fact["completion_tokens"], fact["finish"])

    def attempt(self, key: str, tokens: int) -> int:
        """Write that a request is sent, which needs at most so many tokens; returns the number of the attempt."""
        self._last += 1
        self._add({"try": self._last, "key": key, "tokens": tokens})
        self.requests += 1
        self.tokens += tokens
        return self._last

    def answer(self, number: int, key: str, answer: Answer, model: str) -> None:
        """Write the answer to an attempt."""
        fact = {"answer": number, "key": key, "model": model, "text": answer.text, "finish": answer.finish}
        self._keep(key, {**fact, "prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens})
        self._count(model, answer.prompt_tokens, answer.completion_tokens)

    def refusal(self, key: str, message: str) -> None:
        """Write that the server refuses a request for good."""
        self._keep(key, {"refused": True, "key": key, "message": message})

    def spent(self, number: int, tokens: int, reserved: int) -> None:
        """Write that an attempt needed so many tokens, instead of those that were reserved for it."""
        self._add({"spent": number, "tokens": tokens})
        self.tokens += tokens - reserved

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _keep(self, key: str, fact: dict[str, Any]) -> None:
        start = self._end
        self._add(fact)
        self._places[bytes.fromhex(key)] = (self._own, start, self._end - start)

    def _count(self, model: str, read: int, written: int) -> None:
        usage = self.usage.setdefault(model, [0, 0, 0])
        for index, number in enumerate((1, read, written)):
            usage[index] += number

    def _add(self, fact: dict[str, Any]) -> None:
        content = json.dumps(fact, separators=(",", ":")).encode()
        self._append(b"%s %s\n" % (checksum(content).encode(), content))

    def _append(self, content: bytes) -> None:
        written = self._file.write(content)
        self._end += written or 0
        if written != len(content):  # what is missing would have raised an error of its own, as on a full disk
            self._append(content[written or 0 :])

    def _read(self, path: Path) -> int:
        """Read the file of a rank; returns the number of its last attempt."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._descriptors.append(descriptor)
        tokens: dict[int, int] = {}  # of each attempt
        start = 0
        with open(descriptor, "rb", closefd=False) as file:
            for line in file:
                place, start = (descriptor, start, len(line)), start + len(line)
                fact = _parse(line)
                if fact is None:
                    continue
                if "try" in fact:
                    tokens[fact["try"]] = fact["tokens"]
                elif "spent" in fact:
                    tokens[fact["spent"]] = fact["tokens"]
                else:
                    self._places.setdefault(bytes.fromhex(fact["key"]), place)
                    if "answer" in fact:
                        self._count(fact["model"], fact["prompt_tokens"], fact["completion_tokens"])
        self.requests += len(tokens)
        self.tokens += sum(tokens.values())
        return max(tokens, default=0)


def _lock(descriptor: int, folder: Path) -> None:
    """Raise a ConfigError if another process holds the file; the lock ends with this process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"output_dir={folder.parent}: another command writes there; wait until it has ended, or write another one"
        ) from None
    except OSError:  # the file system has no locks
        return


def _parse(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is damaged, such as the last one of a killed process."""
    digest, _, content = line.rstrip(b"\n").partition(b" ")
    if digest.decode("ascii", "replace") != checksum(content):
        return None
    fact: dict[str, Any] = json.loads(content)
    return fact


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
