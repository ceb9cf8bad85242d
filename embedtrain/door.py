"""What all doors share: read the command line, act on it; errors become one sentence and an exit code."""

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from embedtrain.errors import EmbedtrainError, FailedElsewhere, LostContact

Options = TypeVar("Options")


def enter(read: Callable[[list[str]], Options], act: Callable[[Options], None]) -> NoReturn:
    """Be a command: exit code 0, or 1 after an error of the user's, the same on every rank.

    Args:
        read: from the command line's arguments to options, alike on all ranks. It imports no torch, so that
            `--help` and a mistyped option answer at once.
        act: does what the options say.
    """
    try:
        options = _in_plain_words(lambda: read(sys.argv[1:]), patience=30.0)

        from torch.distributed.elastic.multiprocessing.errors import record

        # Outside of it, so that only what nobody foresaw reaches torchrun's report with a traceback.
        record(_in_plain_words)(lambda: act(options), patience=5.0)
    except SystemExit as leaving:
        _leave(leaving.code)
    _leave(0)


def _in_plain_words(do: Callable[[], Options], *, patience: float) -> Options:
    """Do it; an error of the user's is spoken and ends the process with 1.

    Most errors arise on all ranks alike, and torchrun ends the others as soon as one has left. So the first
    rank of a node speaks and leaves; the rest wait to be ended, and speak only if that does not happen.
    Who lost contact speaks at once: the first rank may be the one that is gone.

    Args:
        do: what to do.
        patience: seconds that another than the first rank waits.
    """
    try:
        return do()
    except EmbedtrainError as error:
        if _environment("LOCAL_RANK") != 0 and not isinstance(error, LostContact):
            time.sleep(patience)
        if not isinstance(error, FailedElsewhere) or _environment("RANK") == 0:
            rank = _environment("RANK")
            print(f"error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(1) from None


def _environment(name: str) -> int:
    return int(os.environ.get(name, "0"))


def _leave(code: object) -> NoReturn:
    """End the process without tearing the interpreter down.

    torch's caches keep process groups alive after they were destroyed, and with them gloo's threads. One that
    lets go of its last tensor while the interpreter goes away aborts the process, after all work was done:
    "terminate called without an active exception" (pytorch issues 130345 and 190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
