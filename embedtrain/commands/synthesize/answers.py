"""The answers of a language model on disk: each is kept before it is used, and each attempt before it is sent.

OUTPUT_DIR/answers/00000.jsonl    attempts and replies of rank 0, in the order in which they happened

Each line has a checksum, so that the last one of a killed process, which may be cut off, is recognised. What was
spent is known after any interruption, and no answer that was kept is asked for again.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.commands.synthesize.types import (
    Answer,
    Refusal,
    RefusalReason,
    Reply,
)
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.utils.files import checksum, make_folder, open_append

if TYPE_CHECKING:
    from embedtrain.distributed.world import World

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
