"""What all doors share: errors become one sentence, spoken once, and an exit code."""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from embedtrain.distributed.world import FailedElsewhere
from embedtrain.errors import EmbedtrainError


def enter(story: Callable[[list[str]], None]) -> None:
    """Run a door's story with the command line's arguments; leave with 1 after an error of the user's.

    Every rank leaves with the same code. The rank an error arose on speaks; an error that arose on all
    ranks alike is spoken by the first of each node alone.
    """
    code: object = 0
    try:
        record(_guarded)(story, sys.argv[1:])
    except SystemExit as leaving:
        code = leaving.code
    _leave(code if isinstance(code, int) else int(code is not None))


def _leave(code: int) -> NoReturn:
    """End the process without tearing the interpreter down.

    torch's caches keep process groups alive after they were destroyed, and with them gloo's threads. One that
    lets go of its last tensor while the interpreter goes away aborts the process, after all work was done:
    "terminate called without an active exception" (pytorch issues 130345 and 190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guarded(story: Callable[[list[str]], None], arguments: list[str]) -> None:
    # Inside torchrun's `record`, so that only what nobody foresaw reaches its report with a traceback.
    try:
        story(arguments)
    except FailedElsewhere as error:
        if os.environ.get("RANK", "0") == "0":
            _speak(str(error))
        raise SystemExit(1) from None
    except EmbedtrainError as error:
        _speak(str(error))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _speak(sentence: str) -> None:
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    where = f"rank {rank}: " if size != "1" and rank != "0" else ""
    print(f"error: {where}{sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def alike_on_all_ranks() -> Iterator[None]:
    """For what does not depend on the rank, before the ranks know each other: only one a node reports it."""
    try:
        yield
    except EmbedtrainError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise SystemExit(1) from None
        raise
