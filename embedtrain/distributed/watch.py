"""Who among the ranks failed, ended or hangs: told over the store that ranks met by, beside all collectives.

Every rank publishes a beat a second: how far it has come, and whether it has left. One key holds the first failure;
whoever writes it speaks for all ranks, the others end in silence. So a run ends with one message, within seconds, also
where the main thread waits in a collective that nothing will end.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from signal import Signals

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from embedtrain.distributed.board import Beat, Board, Failure
from embedtrain.distributed.notes import current, described
from embedtrain.distributed.peers import LocalPeers, names_of
from embedtrain.distributed.stopping import INTERRUPTED, exit_code
from embedtrain.errors import EmbedtrainError, FailedElsewhere, LostContact, Stopped

BEAT = 1.0  # seconds
LOOK = 3.5  # seconds within which a rank that is alive has published a beat
GRACE = 5.0  # seconds that the main thread has to end by itself once the run has failed
# Seconds that another rank has to speak first: one that knows the cause, and the first where all know the same.
_LET_THE_CAUSE_SPEAK, _LET_THE_FIRST_SPEAK = 3.0, 1.0
_CLOSING = 90.0  # seconds that files and trackers take to be closed at most


class Watch:
    """This rank's part in watching over all of them.

    Args:
        store: a connection of its own to the store; made for threads that shall not wait for one another.
        rank: this one.
        size: how many there are.
        local: the ranks of this node.
        patience: seconds that ranks wait for each other.
        hosted: whether one of the ranks, the first, holds the store, which then ends with it.
    """

    def __init__(self, store: Store, rank: int, size: int, local: range, patience: float, *, hosted: bool) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = PrefixStore(f"watch/{attempt}", store)
        self.rank, self.size, self.patience, self.hosted = rank, size, patience, hosted
        self.goes_on: Callable[[], str] = str  # ends a message: from where the same command goes on, if that is known
        self._board = Board(own, rank, size, speaks_alone=rank in {1, local.start})
        self._peers = LocalPeers(own, rank, local)
        self._beats = 0
        self._left = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._go, name="watch", daemon=True)

    def start(self) -> None:
        """Publish who this is, and begin to watch."""
        self._publish()
        self._thread.start()

    def meet(self) -> None:
        """Look for the processes of this node's ranks, once all have said who they are."""
        self._peers.gone()

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
        doing = current()
        self._left = "lost"
        failure = self._found()
        if failure is None:
            text = f"stopped by {asked.name} (rank {self.rank}) while {doing}: the same command goes on"
            failure = self._board.claim(Failure(text, self.rank, exit_code(asked)))
        self._leave("lost")
        self._say(failure)
        return failure.code

    def _explained(self, lost: LostContact) -> LostContact:
        self._leave("lost")
        what = described(lost.what, current().step) if lost.what else str(current())
        failure = self._find(what) or self._board.claim(Failure(f"{lost}{self._ending()}", self.rank))
        self._linger()
        explained = LostContact(lost.reason, lost.what, said=failure.text)
        explained.told_by, explained.exit_code = failure.speaker, failure.code
        return explained

    def _tell(self, error: BaseException) -> None:
        """Publish this rank's failure, unless another rank speaks of it."""
        of_user = isinstance(error, EmbedtrainError)
        if isinstance(error, FailedElsewhere):
            self._await_failure(_LET_THE_CAUSE_SPEAK)
        elif of_user and self.rank:
            self._await_failure(_LET_THE_FIRST_SPEAK)
        text = f"rank {self.rank} failed while {current()}: {type(error).__name__}: {error}"
        said = str(error) if of_user else text + self._ending()
        failure = self._board.claim(
            Failure(said, self.rank, INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
        )
        self._leave("failed")
        if isinstance(error, EmbedtrainError):
            error.told_by, error.exit_code = failure.speaker, failure.code
        elif failure.speaker == self.rank:
            error.add_note(f"error: {failure.text}")
        self._linger()

    def _find(self, what: str) -> Failure | None:
        """Look for who is gone or late; None if nobody is.

        Args:
            what: was being done, by all ranks.
        """
        began, before = time.monotonic(), self._board.beats()
        while time.monotonic() - began < LOOK:
            failure = self._board.failure() or self._found(what)
            if failure is not None:
                return failure
            time.sleep(0.1)
        after = self._board.beats()
        if after is None:
            return None
        there = {rank: beat for rank, beat in after.items() if not beat.left and rank != self.rank}
        earlier = {rank: beat.count for rank, beat in (before or {}).items()}
        silent = [rank for rank, beat in there.items() if beat.count == earlier.get(rank)]
        if silent:
            signs = f"no sign of life for {LOOK:.0f} s{self._peers.told(silent)}"
            return self._board.claim(self._failure(f"{names_of(silent)} ended or hangs ({signs}) while {what}", silent))
        late = self._hang(there)
        return None if late is None else self._board.claim(late)

    def _found(self, what: str | None = None) -> Failure | None:
        """A failure that is certain at once: a process of this node has ended without a word, or the store has."""
        gone = self._gone()
        return (
            self._board.claim(self._failure(f"{names_of(gone)} ended while {what or current()}", gone))
            if gone
            else None
        )

    def _gone(self) -> list[int]:
        """Ranks that have ended without saying so."""
        gone = self._peers.gone()
        # All beats are read only where a process is missing: ranks that each did so every second would drown the store.
        beats = self._board.beats() if gone else {}
        if beats is None or not self._board.answers():  # with the store nothing can be known of the others
            return [0] if self.hosted and not self._peers.runs(0) else []
        return [rank for rank in gone if rank not in beats or not beats[rank].left]

    def _hang(self, late: dict[int, Beat]) -> Failure | None:
        if not late:
            return None
        first = next(iter(late.values()))
        which = "hangs: alive, but has" if len(late) == 1 else "hang: alive, but the first has"
        doing = described(first.what, first.step)
        return self._failure(f"{names_of(list(late))} {which} been in {doing}, for {first.seconds:.0f} s", list(late))

    def _failure(self, text: str, ranks: list[int]) -> Failure:
        return Failure(text + self._ending(), self.rank, hanging=tuple(ranks))

    def _ending(self) -> str:
        try:
            found = self.goes_on()
        except OSError:
            return ""
        return f"; {found}" if found else ""

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
                    self._end(self._board.claim(failure))
                continue
            trouble = trouble or now
            if now - trouble > GRACE and not self._left:
                self._leave("lost")
                self._end(failure or self._find(str(current())) or self._failure("another rank is gone", []))

    def _behind(self, now: float) -> Failure | None:
        """Whether ranks hang that this one has waited for longer than ranks wait.

        A collective of gloo ends by itself then; of NCCL's one does not know whom it waited for.
        """
        doing = current()
        if now - doing.since <= self.patience + LOOK:
            return None
        beats = self._board.beats() or {}
        return self._hang({rank: beat for rank, beat in beats.items() if beat.number < doing.number and not beat.left})

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
        if failure.speaker == self.rank:
            print(("error: " if failure.code == 1 else "") + failure.text, file=sys.stderr, flush=True)

    def _publish(self) -> None:
        self._beats += 1
        doing = current()
        seconds = time.monotonic() - doing.since
        self._board.publish(Beat(self._beats, doing.number, doing.what, doing.step, seconds, self._left))

    def _leave(self, how: str) -> None:
        self._left = how
        self._publish()

    def _await_failure(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._board.failure() is None and time.monotonic() < until:
            time.sleep(0.05)

    def _linger(self) -> None:
        """Stay until the others have read why the run ends, where the store ends with this process."""
        until = time.monotonic() + GRACE
        while self.hosted and self.rank == 0 and time.monotonic() < until:
            beats, gone = self._board.beats() or {}, self._peers.gone()
            if all(beat.left for rank, beat in beats.items() if rank not in gone):
                return
            time.sleep(0.1)
