"""Who among the ranks failed, ended or hangs: told over the store that ranks met by, beside all collectives.

Every rank publishes a beat a second: how far it has come, and whether it has left. One key holds the first failure;
whoever writes it speaks for all ranks, the others end in silence. So a run ends with one message, within seconds, also
where the main thread waits in a collective that nothing will end.
"""

import contextlib
import faulthandler
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from signal import Signals

from torch.distributed import Store  # type: ignore[attr-defined]

from embedtrain.distributed.signals import EXIT_INTERRUPTED, exit_code
from embedtrain.distributed.watchdog.activity import current_activity, describe_activity
from embedtrain.distributed.watchdog.heartbeats import Failure, Heartbeat, HeartbeatStore
from embedtrain.distributed.watchdog.launcher import start_launcher_reaper
from embedtrain.distributed.watchdog.peers import LocalProcesses, format_ranks, hosts_by_rank
from embedtrain.errors import EmbedtrainError, FailedElsewhere, LostContact, Stopped

BEAT = 1.0  # seconds
LOOK = 3.5  # seconds within which a rank that is alive has published a beat
GRACE = 5.0  # seconds that the main thread has to end by itself once the run has failed
# Seconds that another rank has to speak first: one that knows the cause, and the first where all know the same.
_LET_THE_CAUSE_SPEAK, _LET_THE_FIRST_SPEAK = 3.0, 1.0
_SILENT = 10.0  # seconds without a beat after which a rank that is waited for too long counts as gone
_CLOSING = 90.0  # seconds that files and trackers take to be closed at most


class Watchdog:
    """This rank's part in watching over all of them.

    Args:
        store: a connection of its own to the store, which nothing of an earlier attempt is found in.
        rank: this one.
        size: how many there are.
        local: the ranks of this node.
        patience: seconds that ranks wait for each other.
        store_on_rank_0: whether one of the ranks, the first, holds the store, which then ends with it.
    """

    def __init__(
        self, store: Store, rank: int, size: int, local: range, patience: float, *, store_on_rank_0: bool
    ) -> None:
        self.rank, self.size, self.patience, self.store_on_rank_0 = rank, size, patience, store_on_rank_0
        self.resume_hint: Callable[[], str] = (
            str  # ends a message: from where the same command goes on, if that is known
        )
        self._board = HeartbeatStore(store, rank, size, reports_alone=rank in {1, local.start})
        self._peers = LocalProcesses(store, rank, local)
        self._store, self._hosts = store, list[str]()
        self.silence = patience  # seconds after which a rank without a sign of life is gone, whatever is being done
        self._seen: dict[int, tuple[int, float]] = {}  # the count of each rank's beats, and when it was first seen
        self._look_at = 0.0
        self._silent_since: float | None = None
        self._is_first_here = rank == local.start
        self._beats = 0
        self._left = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._go, name="watch", daemon=True)

    def start(self) -> None:
        """Publish who this is, and begin to watch."""
        self._publish()
        self._thread.start()

    def learn_hosts(self) -> None:
        """Learn where the ranks are, once all have said so, and look for the processes of those on this host."""
        self._peers.gone()
        self._hosts = hosts_by_rank(self._store, self.rank, self.size)

    def close(self) -> None:
        """Leave in peace."""
        self._leave("done")
        self._closed.set()
        self._thread.join(LOOK)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Tell the others at once when the block fails, and agree on who tells the user.

        Raises:
            LostContact: says which rank is gone or hangs.
        """
        try:
            yield
        except LostContact as error:
            if self._left:
                raise
            raise self._explained(error) from error.__cause__
        except Stopped:
            self._leave("done")  # as all ranks do
            raise
        except BaseException as error:
            if not self._left:
                self._tell(error)
            raise

    def stopped(self, asked: Signals) -> int:
        """Say that a signal ends this process at once; the code to end with.

        A launcher also sends a signal when another rank has ended: then it is that rank that is spoken of.
        """
        if self._left:  # the main thread is about to end the process, with the code of what happened
            time.sleep(LOOK + GRACE)
            return 1
        doing = current_activity()
        self._left = "lost"
        failure = self._found()
        if failure is None:
            text = f"stopped by {asked.name} (rank {self.rank}) while {doing}: the same command goes on"
            failure = self._board.claim_failure(Failure(text, self.rank, exit_code(asked)))
        self._leave("lost")
        self._say(failure)
        return failure.code

    def _explained(self, lost: LostContact) -> LostContact:
        self._leave("lost")
        what = describe_activity(lost.what, current_activity().step) if lost.what else str(current_activity())
        failure = self._find(what) or self._board.claim_failure(self._cut_off(what, lost))
        self._linger()
        explained = LostContact(lost.reason, lost.what, said=failure.text)
        explained.reporting_rank, explained.exit_code = failure.reporting_rank, failure.code
        return explained

    def _tell(self, error: BaseException) -> None:
        """Publish this rank's failure, unless another rank speaks of it."""
        of_user = isinstance(error, EmbedtrainError)
        if isinstance(error, FailedElsewhere):
            self._await_failure(_LET_THE_CAUSE_SPEAK)
        elif of_user and self.rank:
            self._await_failure(_LET_THE_FIRST_SPEAK)
        text = f"{self._names([self.rank])} failed while {current_activity()}: {type(error).__name__}: {error}"
        said = str(error) if of_user else text + self._ending()
        failure = self._board.claim_failure(
            Failure(said, self.rank, EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
        )
        self._leave("failed")
        if isinstance(error, EmbedtrainError):
            error.reporting_rank, error.exit_code = failure.reporting_rank, failure.code
        elif failure.reporting_rank == self.rank:
            error.add_note(f"error: {failure.text}")
        self._linger()

    def _find(self, what: str) -> Failure | None:
        """Look for who is gone or late; None if nobody is.

        Args:
            what: was being done, by all ranks.
        """
        began, before = time.monotonic(), self._board.heartbeats()
        while time.monotonic() - began < LOOK:
            failure = self._board.failure() or self._found(what)
            if failure is not None:
                return failure
            time.sleep(0.1)
        after = self._board.heartbeats()
        if after is None:
            return None
        there = {rank: beat for rank, beat in after.items() if not beat.left and rank != self.rank}
        earlier = {rank: beat.count for rank, beat in (before or {}).items()}
        silent = [rank for rank, beat in there.items() if beat.count == earlier.get(rank)]
        if silent:
            return self._board.claim_failure(self._no_sign(silent, what, LOOK))
        late = self._hang(there)
        return None if late is None else self._board.claim_failure(late)

    def _found(self, what: str | None = None) -> Failure | None:
        """A failure that is certain at once: a process of this node has ended without a word, or the store has."""
        gone = self._gone()
        return (
            self._board.claim_failure(
                self._failure(f"{self._names(gone)} ended while {what or current_activity()}", gone)
            )
            if gone
            else None
        )

    def _gone(self) -> list[int]:
        """Ranks that have ended without saying so."""
        gone = self._peers.gone()
        # All beats are read only where a process is missing: ranks that each did so every second would drown the store.
        heartbeats = self._board.heartbeats() if gone else {}
        if self._board.is_lost:  # with the store nothing can be known of the others
            return [0] if self.store_on_rank_0 and not self._peers.runs(0) else []
        if heartbeats is None:  # it does not answer for the moment: who is gone may have said so
            return []
        return [rank for rank in gone if rank not in heartbeats or not heartbeats[rank].left]

    def _no_sign(self, silent: list[int], what: str, seconds: float) -> Failure:
        signs = f"no sign of life for {seconds:.0f} s{self._peers.told(silent)}"
        away = bool(self._hosts) and all(self._hosts[rank] != self._hosts[self.rank] for rank in silent)
        which = f"ended or hangs{', or the network is out' if away else ''}"
        return self._failure(f"{self._names(silent)} {which} ({signs}) while {what}", silent)

    def _hang(self, late: dict[int, Heartbeat]) -> Failure | None:
        if not late:
            return None
        first = next(iter(late.values()))
        which = "hangs: alive, but has" if len(late) == 1 else "hang: alive, but the first has"
        doing = describe_activity(first.what, first.step)
        return self._failure(
            f"{self._names(list(late))} {which} been in {doing}, for {first.seconds:.0f} s", list(late)
        )

    def _cut_off(self, what: str, lost: LostContact | None = None) -> Failure:
        """Nobody is found to be gone or late: then it is this rank that is, or the network."""
        me = self._names([self.rank])
        if self._board.is_unresponsive:
            there = os.environ.get("MASTER_ADDR", "another host")
            out = f"the network between them is out, or that host{f' ({lost.reason})' if lost else ''}"
            return self._failure(f"{me} lost contact with {there} while {what}: {out}", [])
        return self._failure(f"{me}: {lost or 'another rank is gone'}", [])

    def _names(self, ranks: Sequence[int]) -> str:
        return format_ranks(ranks, self._hosts)

    def _failure(self, text: str, ranks: list[int]) -> Failure:
        return Failure(text + self._ending(), self.rank, hanging=tuple(ranks))

    def _ending(self) -> str:
        # A shared file system may be gone with the network: it is not waited for.
        found: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._look, args=(found,), daemon=True).start()
        try:
            return found.get(timeout=GRACE)
        except queue.Empty:
            return ""

    def _look(self, found: "queue.SimpleQueue[str]") -> None:
        with contextlib.suppress(OSError):
            text = self.resume_hint()
            found.put(f"; {text}" if text else "")

    # What follows runs in the thread.

    def _go(self) -> None:
        trouble: float | None = None
        while not self._closed.wait(BEAT):
            self._publish()
            now = time.monotonic()
            if self._left:
                trouble = trouble or now
                if now - trouble > _CLOSING:
                    os._exit(1)
                continue
            failure = self._board.failure()
            if failure is None and not self._gone():
                trouble = None
                failure = self._behind(now)
                if failure is not None:
                    self._end(self._board.claim_failure(failure))
                continue
            trouble = trouble or now
            if now - trouble > GRACE and not self._left:
                self._leave("lost")
                self._end(failure or self._find(str(current_activity())) or self._cut_off(str(current_activity())))

    def _behind(self, now: float) -> Failure | None:
        """Whether ranks hang that this one has waited for longer than ranks wait, or some have long been silent.

        A collective of gloo ends by itself then; of NCCL's one does not know whom it waited for.
        """
        doing = current_activity()
        waited_long = now - doing.since > self.patience + LOOK
        if self._board.is_unresponsive:
            self._silent_since = self._silent_since or now
            too_long = waited_long or now - self._silent_since > self.silence
            return self._cut_off(str(doing)) if too_long else None
        self._silent_since = None
        # The first rank looks for all: ranks that each read all beats would drown the store.
        if not waited_long and (self.rank or now < self._look_at):
            return None
        self._look_at = now + LOOK
        heartbeats = self._board.heartbeats()
        if heartbeats is None:
            return self._cut_off(str(doing)) if waited_long else None
        for rank, beat in heartbeats.items():
            if self._seen.get(rank, (-1, 0.0))[0] != beat.count:
                self._seen[rank] = beat.count, now
        limit = _SILENT if waited_long else self.silence
        quiet = {rank: now - self._seen[rank][1] for rank, beat in heartbeats.items() if not beat.left}
        if max(quiet.values(), default=0.0) > limit:
            # Ranks that were lost together have not all spoken last in the same second.
            silent = [rank for rank, seconds in quiet.items() if seconds > max(limit - LOOK, limit / 2)]
            return self._no_sign(silent, str(doing), limit)
        late = {rank: beat for rank, beat in heartbeats.items() if beat.number < doing.number and not beat.left}
        return self._hang(late) if waited_long else None

    def _end(self, failure: Failure) -> None:
        self._leave("lost")
        if self.rank in failure.hanging:
            print(f"rank {self.rank} was here when the others gave up:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr)
        self._say(failure)
        self._linger()
        sys.stdout.flush()
        os._exit(failure.code)

    def _say(self, failure: Failure) -> None:
        if failure.reporting_rank == self.rank:
            print(("error: " if failure.code == 1 else "") + failure.text, file=sys.stderr, flush=True)

    def _publish(self) -> None:
        self._beats += 1
        doing = current_activity()
        seconds = time.monotonic() - doing.since
        self._board.publish(Heartbeat(self._beats, doing.number, doing.what, doing.step, seconds, self._left))

    def _leave(self, how: str) -> None:
        self._left = how
        self._publish()
        if how != "done" and self._is_first_here and self._board.is_unresponsive:
            self._is_first_here = False  # once
            start_launcher_reaper()

    def _await_failure(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._board.failure() is None and time.monotonic() < until:
            time.sleep(0.05)

    def _linger(self) -> None:
        """Stay until the others have read why the run ends, where the store ends with this process."""
        until = time.monotonic() + GRACE
        while self.store_on_rank_0 and self.rank == 0 and time.monotonic() < until:
            heartbeats, gone = self._board.heartbeats() or {}, self._peers.gone()
            if all(beat.left for rank, beat in heartbeats.items() if rank not in gone):
                return
            time.sleep(0.1)
