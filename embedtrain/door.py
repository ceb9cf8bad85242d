"""What all doors share: read the command line, act on it; errors become one sentence and an exit code."""

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from embedtrain.errors import EmbedtrainError, FailedElsewhere

Options = TypeVar("Options")


def enter(read: Callable[[list[str]], Options], act: Callable[[Options], None]) -> NoReturn:
    """Be a command: exit code 0, or 1 after an error of the user's, the same on every rank.

    The rank an error arose on speaks; what arises on all ranks alike is spoken by one of each node.

    Args:
        read: from the command line's arguments to options. It imports no torch, so that `--help` and a
            mistyped option answer at once.
        act: does what the options say.
    """
    try:
        options = _in_plain_words(lambda: read(sys.argv[1:]), alike=True)

        from torch.distributed.elastic.multiprocessing.errors import record

        # Outside of it, so that only what nobody foresaw reaches torchrun's report with a traceback.
        record(_in_plain_words)(lambda: act(options))
    except SystemExit as leaving:
        _leave(leaving.code)
    _leave(0)


def _in_plain_words(do: Callable[[], Options], *, alike: bool = False) -> Options:
    """Do it; an error of the user's is spoken and ends the process with 1."""
    try:
        return do()
    except FailedElsewhere as error:
        if _environment("RANK") == 0:
            _speak(error)
    except EmbedtrainError as error:
        if not alike or _environment("LOCAL_RANK") == 0:
            _speak(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(1) from None


def _speak(error: EmbedtrainError) -> None:
    rank = _environment("RANK")
    print(f"error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)


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
