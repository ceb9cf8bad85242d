"""Detection of failed, lost and hanging ranks over the rendezvous store, independent of collectives.

Every rank publishes a heartbeat each second: its current activity, and whether it has left. One key holds the first
failure. The rank that writes it reports for all ranks; the others end silently. So a run ends with one message within
seconds, even if the main thread waits in a collective that never completes.
"""

import contextlib
import faulthandler
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from signal import Signals
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from embedtrain.distributed.signals import EXIT_INTERRUPTED, exit_code, start_monitor
from embedtrain.distributed.watchdog.launcher import find_launcher, start_launcher_reaper
from embedtrain.distributed.watchdog.peers import LocalProcesses, format_ranks, hosts_by_rank
from embedtrain.errors import EmbedtrainError, FailedElsewhere, LostContact, Stopped


@dataclass(frozen=True, slots=True)
class Activity:
    """What the main thread is doing."""

    name: str = "starting"  # such as "evaluating dev"
    step: int | None = None  # optimizer step it belongs to; None before training
    # Activities recorded so far. All ranks record the same sequence, so a rank with a lower number is behind.
    number: int = 0
    since: float = field(default_factory=time.monotonic)  # start, on the clock of `time.monotonic`

    def __str__(self) -> str:
        return describe_activity(self.name, self.step)


def describe_activity(name: str, step: int | None) -> str:
    """`training, step 13`."""
    return name if step is None else f"{name}, step {step}"


# One main thread does one thing at a time. A list, because a function cannot rebind a module's name without `global`.
_current = [Activity()]


def current_activity() -> Activity:
    """The activity of the main thread; callable from any thread."""
    return _current[0]


def set_activity(name: str, step: int | None = None) -> None:
    """Record what the main thread does next. Without a step, the previous one is kept. Other threads are ignored."""
    if threading.current_thread() is threading.main_thread():
        previous = _current[0]
        _current[0] = Activity(name, previous.step if step is None else step, previous.number + 1)


@contextlib.contextmanager
def activity(name: str) -> Iterator[None]:
    """Record the activity of the block, and the previous one again when the block ends.

    After an error the activity is kept: a message about the error names it.
    """
    previous = _current[0]
    set_activity(name)
    yield
    set_activity(previous.name)


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


HEARTBEAT_INTERVAL = 1.0  # seconds
OBSERVATION = 3.5  # seconds within which every live rank publishes a heartbeat
GRACE = 5.0  # seconds that the main thread has to end by itself after the run has failed
# Seconds that other ranks have to report first: a rank that knows the cause, and rank 0 if all ranks know the same.
_WAIT_FOR_CAUSE, _WAIT_FOR_RANK_0 = 3.0, 1.0
_MAX_SILENCE_WHEN_LATE = 10.0  # seconds without a heartbeat after which a rank that others wait for counts as lost
_MAX_CLOSING = 90.0  # seconds that closing files and trackers may take
# Seconds that a failed run may still write the checkpoint that is being saved. A model of 7 billion parameters has
# checkpoints of 84 GB: seven minutes at 200 MB/s.
MAX_FINISHING = 600.0

# What a thread of this process does, and its future.
UnfinishedWork = tuple[str, Future[None]]


class Watchdog:
    """This rank's part in monitoring all ranks.

    Args:
        store: a connection of its own to the rendezvous store, without entries of earlier starts.
        timeout: seconds that ranks wait for each other.
        store_on_rank_0: whether rank 0 hosts the store, which then ends with it.

    Attributes:
        resume_hint: returns the end of a message: where a run would resume, if known.
        unfinished: returns work of all ranks, such as an asynchronous checkpoint, that this process does not end before
            if the run fails; None if there is none.
        backend_error: returns the error of collectives that this process will not see as an exception, or "". NCCL
            reports that a connection is lost, while the main thread waits for the GPU, and the GPU for the lost rank.
        max_silence: seconds without a heartbeat after which a rank counts as lost, whatever the ranks are doing.
    """

    def __init__(
        self, store: Store, rank: int, size: int, local: range, timeout: float, *, store_on_rank_0: bool
    ) -> None:
        self.rank, self.size, self.timeout, self.store_on_rank_0 = rank, size, timeout, store_on_rank_0
        self.resume_hint: Callable[[], str] = str
        self.unfinished: Callable[[], UnfinishedWork | None] = lambda: None
        self.backend_error: Callable[[], str] = str
        self.max_silence = timeout
        self._launcher = find_launcher()
        self._heartbeats = HeartbeatStore(
            store, rank, size, reports_alone=rank in {1, local.start}, has_ended=self._store_has_ended
        )
        self._processes = LocalProcesses(store, rank, local)
        self._store, self._hosts = store, list[str]()
        self._last_seen: dict[int, tuple[int, float]] = {}  # rank -> heartbeat count, and when it was first seen
        self._next_check = 0.0
        self._unresponsive_since: float | None = None
        self._may_start_reaper = rank == local.start
        self._count = 0
        self._exit_state = ""
        self._is_finishing = self._is_exiting = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start publishing heartbeats and monitoring."""
        self._publish()
        self._thread = start_monitor("watchdog", self._monitor)

    def learn_hosts(self) -> None:
        """Read the hosts of all ranks, once all have published theirs, and find the processes on this host.

        Raises the same ConfigError on every rank if they are not those that the launcher has named.
        """
        self._processes.ended()
        self._hosts = hosts_by_rank(self._store, self.rank, self.size)

    def close(self) -> None:
        """Leave without a failure."""
        self._leave("done")
        self._closed.set()
        if self._thread is not None:
            self._thread.join(OBSERVATION)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Report a failure of the block to the other ranks at once, and agree on the rank that reports it.

        The error is raised once unfinished work is complete, see `finish_work`.
        """
        try:
            yield
        except LostContact as error:
            self._await_exit()
            if self._exit_state:
                raise
            raise self._end_after_lost_contact(error) from error.__cause__
        except Stopped:
            self._leave("done")  # as all ranks do
            raise
        except BaseException as error:
            self._await_exit()
            if not self._exit_state:
                self._end_after_error(error)
            raise

    def _await_exit(self) -> None:
        """If the watchdog's thread is ending this process, let it: it reports the cause."""
        while self._is_exiting:
            time.sleep(OBSERVATION)

    def end_after_signal(self, received: Signals) -> int:
        """Report that a signal ends this process immediately; return its exit code.

        A launcher also sends a signal after another rank has ended; in that case the report is about that rank.
        """
        if self._exit_state:  # the main thread is about to end the process, with the exit code of the failure
            time.sleep(OBSERVATION + GRACE)
            return 1
        activity = current_activity()
        self._exit_state = "lost"
        failure = self._find_ended()
        if failure is None:
            text = f"stopped by {received.name} (rank {self.rank}) while {activity}: run the same command to resume"
            failure = self._heartbeats.claim_failure(Failure(text, self.rank, exit_code(received)))
        self._leave("lost")
        self._print(failure)
        return failure.code

    # How this rank ends is decided in one of three places: after an error of its own, after a collective that another
    # rank has left, or in a thread, after a signal or by the watchdog itself (`_exit`).

    def _end_after_lost_contact(self, error: LostContact) -> LostContact:
        """The error to raise: the cause that the ranks agree on."""
        self._leave("lost")
        activity = describe_activity(error.what, current_activity().step) if error.what else str(current_activity())
        failure = self._find_failure(activity) or self._heartbeats.claim_failure(
            self._isolated_failure(activity, error)
        )
        self._finish_work(failure)
        self._linger()
        explained = LostContact(error.reason, error.what, said=self._message(failure))
        explained.reporting_rank, explained.exit_code = failure.reporting_rank, failure.code
        return explained

    def _end_after_error(self, error: BaseException) -> None:
        """Publish this rank's failure unless another rank reports it."""
        is_user_error = isinstance(error, EmbedtrainError)
        if isinstance(error, FailedElsewhere):
            self._await_failure(_WAIT_FOR_CAUSE)
        elif is_user_error and self.rank:
            self._await_failure(_WAIT_FOR_RANK_0)
        text = f"{self._format_ranks([self.rank])} failed while {current_activity()}: {type(error).__name__}: {error}"
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        own = Failure(str(error) if is_user_error else text, self.rank, code, resumes=not is_user_error)
        failure = self._heartbeats.claim_failure(own)
        self._leave("failed")
        if not isinstance(error, KeyboardInterrupt):  # who interrupts does not want to wait
            self._finish_work(failure)
        if isinstance(error, EmbedtrainError):
            error.reporting_rank, error.exit_code = failure.reporting_rank, failure.code
        elif failure.reporting_rank == self.rank:
            error.add_note(f"error: {self._message(failure)}")
        self._linger()

    def _finish_work(self, failure: Failure) -> None:
        """Wait for unfinished work of all ranks, while all of them are alive, for at most MAX_FINISHING seconds."""
        unfinished = self.unfinished()
        if unfinished is None or unfinished[1].done():
            return
        what, work = unfinished
        if failure.reporting_rank == self.rank:
            limit = f"for at most {MAX_FINISHING / 60:.0f} minutes"
            print(f"{failure.text}; the ranks are still {what}, {limit}", file=sys.stderr, flush=True)
        deadline, next_check, counts = time.monotonic() + MAX_FINISHING, 0.0, dict[int, int]()
        self._is_finishing = True
        while not wait([work], timeout=HEARTBEAT_INTERVAL).done and (now := time.monotonic()) < deadline:
            self._publish()
            if now < next_check:
                continue
            next_check, before = now + _MAX_SILENCE_WHEN_LATE, counts
            counts = {rank: beat.count for rank, beat in (self._heartbeats.heartbeats() or {}).items()}
            if any(before.get(rank) == count for rank, count in counts.items()):  # it cannot do its part
                break
        self._is_finishing = False

    def _find_failure(self, activity: str, *, late: bool = True) -> Failure | None:
        """Find ranks that are lost, or if `late` those that this rank waited for; None if there are none."""
        started, before = time.monotonic(), self._heartbeats.heartbeats()
        while time.monotonic() - started < OBSERVATION:
            failure = self._heartbeats.failure() or self._find_ended(activity)
            if failure is not None:
                return failure
            time.sleep(0.1)
        after = self._heartbeats.heartbeats()
        if after is None:
            return None
        running = {rank: beat for rank, beat in after.items() if not beat.exit_state and rank != self.rank}
        earlier = {rank: beat.count for rank, beat in (before or {}).items()}
        silent = [rank for rank, beat in running.items() if beat.count == earlier.get(rank)]
        if silent:
            return self._heartbeats.claim_failure(self._silent_failure(silent, activity, OBSERVATION))
        hanging = self._hanging_failure(running) if late else None
        return None if hanging is None else self._heartbeats.claim_failure(hanging)

    def _find_ended(self, activity: str | None = None) -> Failure | None:
        """A failure that is certain: a process of this host has ended without reporting, or the store is lost."""
        ranks = self._ended_ranks()
        if not ranks:
            return None
        text = f"{self._format_ranks(ranks)} ended while {activity or current_activity()}"
        return self._heartbeats.claim_failure(self._failure(text, ranks))

    def _store_has_ended(self) -> bool:
        """Whether the only agent, which hosts the store, was killed; of several agents it may be another's store."""
        is_only = not self.store_on_rank_0 and os.environ.get("GROUP_WORLD_SIZE") == "1"
        return is_only and self._launcher is not None and self._launcher.has_ended

    def _ended_ranks(self) -> list[int]:
        """Ranks that have ended without reporting."""
        ended = self._processes.ended()
        # Heartbeats are read only if a process is missing: reads by every rank each second would overload the store.
        heartbeats = self._heartbeats.heartbeats() if ended else {}
        if self._heartbeats.is_lost:  # nothing can be learned about other ranks
            return [0] if self.store_on_rank_0 and not self._processes.runs(0) else []
        if heartbeats is None:  # no reply at the moment: the ended ranks may have reported
            return []
        return [rank for rank in ended if rank not in heartbeats or not heartbeats[rank].exit_state]

    def _silent_failure(self, ranks: list[int], activity: str, seconds: float) -> Failure:
        remote = bool(self._hosts) and all(self._hosts[rank] != self._hosts[self.rank] for rank in ranks)
        state = f"ended or {'hangs' if len(ranks) == 1 else 'hang'}{', or the network is down' if remote else ''}"
        signs = f"no heartbeat for {seconds:.0f} s{self._processes.describe(ranks)}"
        return self._failure(f"{self._format_ranks(ranks)} {state} ({signs}) while {activity}", ranks)

    def _hanging_failure(self, late: dict[int, Heartbeat]) -> Failure | None:
        if not late:
            return None
        first = next(iter(late.values()))
        state = "hangs: alive, but" if len(late) == 1 else "hang: alive, the first"
        activity = describe_activity(first.activity, first.step)
        text = f'{self._format_ranks(list(late))} {state} in "{activity}" for {first.seconds:.0f} s'
        return self._failure(text, list(late))

    def _isolated_failure(self, activity: str, error: LostContact | None = None) -> Failure:
        """No rank is lost or late, so this rank or the network is the cause."""
        own_name = self._format_ranks([self.rank])
        if self._heartbeats.is_unresponsive:
            if self._launcher is not None and self._launcher.is_suspended:
                return self._failure(f"{own_name} ends while {activity}: {self._launcher} is suspended", [])
            host = self._hosts[0] if self._hosts else os.environ.get("MASTER_ADDR", "another host")
            reason = f" ({error.reason})" if error else ""
            text = f"{own_name} lost contact with {host} while {activity}: "
            return self._failure(f"{text}that host or the network between them is down{reason}", [])
        return self._failure(f"{own_name}: {error or 'another rank is lost'}", [])

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        return format_ranks(ranks, self._hosts)

    def _failure(self, text: str, ranks: list[int]) -> Failure:
        return Failure(text, self.rank, hanging=tuple(ranks), resumes=True)

    def _message(self, failure: Failure) -> str:
        """The whole message; the end is read only when it is printed, after unfinished work."""
        is_printed = failure.reporting_rank == self.rank
        return failure.text + (self._resume_suffix() if failure.resumes and is_printed else "")

    def _resume_suffix(self) -> str:
        # In a thread with a time-out: a shared file system may be lost together with the network.
        result: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_resume_hint, args=(result,), daemon=True).start()
        try:
            return result.get(timeout=GRACE)
        except queue.Empty:
            return ""

    def _read_resume_hint(self, result: "queue.SimpleQueue[str]") -> None:
        with contextlib.suppress(OSError, EmbedtrainError):
            hint = self.resume_hint()
            result.put(f"; {hint}" if hint else "")

    # The following methods run in the watchdog's thread.

    def _monitor(self) -> None:
        failed_since: float | None = None
        while not self._closed.wait(HEARTBEAT_INTERVAL):
            self._publish()
            now = time.monotonic()
            if self._exit_state:
                failed_since = now if self._is_finishing else failed_since or now
                if now - failed_since > _MAX_CLOSING:
                    os._exit(1)
                continue
            failure, error = self._heartbeats.failure(), self.backend_error()
            if failure is None and not error and not self._ended_ranks():
                failed_since = None
                failure = self._find_late(now)
                if failure is not None:
                    self._exit(self._heartbeats.claim_failure(failure))
                continue
            failed_since = failed_since or now
            if now - failed_since > GRACE and not self._exit_state:
                self._is_exiting = True
                self._leave("lost")
                activity = str(current_activity())
                failure = failure or self._find_failure(activity, late=not error)
                self._exit(failure or self._isolated_failure(activity, LostContact(error) if error else None))

    def _find_late(self, now: float) -> Failure | None:
        """Find ranks that this rank has waited for longer than the time-out, or that have been silent for long.

        A gloo collective times out by itself; an NCCL collective does not tell which rank it waited for.
        """
        activity = current_activity()
        waited_long = now - activity.since > self.timeout + OBSERVATION
        if self._heartbeats.is_unresponsive:
            self._unresponsive_since = self._unresponsive_since or now
            too_long = waited_long or now - self._unresponsive_since > self.max_silence
            return self._isolated_failure(str(activity)) if too_long else None
        self._unresponsive_since = None
        # Rank 0 checks for all ranks: reads by every rank would overload the store.
        if not waited_long and (self.rank or now < self._next_check):
            return None
        self._next_check = now + OBSERVATION
        heartbeats = self._heartbeats.heartbeats()
        if heartbeats is None:
            return self._isolated_failure(str(activity)) if waited_long else None
        for rank, beat in heartbeats.items():
            if self._last_seen.get(rank, (-1, 0.0))[0] != beat.count:
                self._last_seen[rank] = beat.count, now
        limit = _MAX_SILENCE_WHEN_LATE if waited_long else self.max_silence
        silence = {rank: now - self._last_seen[rank][1] for rank, beat in heartbeats.items() if not beat.exit_state}
        if max(silence.values(), default=0.0) > limit:
            # Ranks that were lost together did not all send their last heartbeat in the same second.
            ranks = [rank for rank, seconds in silence.items() if seconds > max(limit - OBSERVATION, limit / 2)]
            return self._silent_failure(ranks, str(activity), limit)
        late = {
            rank: beat
            for rank, beat in heartbeats.items()
            if beat.activity_number < activity.number and not beat.exit_state
        }
        return self._hanging_failure(late) if waited_long else None

    def _exit(self, failure: Failure) -> None:
        self._is_exiting = True
        self._leave("lost")
        if self.rank in failure.hanging:
            print(f"stack of rank {self.rank} when the other ranks gave up:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr)
        self._finish_work(failure)
        self._print(failure)
        self._linger()
        sys.stdout.flush()
        os._exit(failure.code)

    def _print(self, failure: Failure) -> None:
        if failure.reporting_rank == self.rank:
            print(("error: " if failure.code == 1 else "") + self._message(failure), file=sys.stderr, flush=True)

    def _publish(self) -> None:
        self._count += 1
        activity = current_activity()
        seconds = time.monotonic() - activity.since
        self._heartbeats.publish(
            Heartbeat(self._count, activity.number, activity.name, activity.step, seconds, self._exit_state)
        )

    def _leave(self, exit_state: str) -> None:
        self._exit_state = exit_state
        self._publish()
        if exit_state != "done" and self._may_start_reaper and self._heartbeats.is_unresponsive:
            self._may_start_reaper = False
            start_launcher_reaper()

    def _await_failure(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._heartbeats.failure() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def _linger(self) -> None:
        """Keep the store alive until the other ranks have read the failure, if this process hosts the store."""
        deadline = time.monotonic() + GRACE
        while self.store_on_rank_0 and self.rank == 0 and time.monotonic() < deadline:
            heartbeats, ended = self._heartbeats.heartbeats() or {}, self._processes.ended()
            if all(beat.exit_state for rank, beat in heartbeats.items() if rank not in ended):
                return
            time.sleep(0.1)
