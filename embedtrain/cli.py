"""What all doors share: read the command line, act on it; errors become one sentence and an exit code."""

import atexit
import contextlib
import io
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from typing import NoReturn, TypeVar

from embedtrain.distributed.srun import set_ranks_from_srun
from embedtrain.errors import EmbedtrainError, FailedElsewhere, LostContact, Stopped


def set_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give each of a machine's ranks its part of the cores, and let threads that wait sleep.

    torchrun sets one thread a rank; ranks that srun or others started would each take all cores. Threads that spin at
    a barrier while another rank needs their core make all of them slower (6.8 times, measured with two threads on two
    cores beside another process). What the user has set stays.
    """
    ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 2:  # what is no number is complained of where ranks meet
        return
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_usable_cores() // int(ranks))))


def num_usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Options = TypeVar("Options")

# How accelerate's launcher tells its settings. transformers reads them as well, wherever a model is loaded: with
# ACCELERATE_USE_FSDP and FSDP_CPU_RAM_EFFICIENT_LOADING every rank but the first gets one without weights.
_ACCELERATE_PREFIXES = ("ACCELERATE_", "FSDP_")
_LAYER_CLASS_VARIABLE = "FSDP_TRANSFORMER_CLS_TO_WRAP"  # the layer class; whoever uses it says so


def run_command(
    read: Callable[[list[str]], Options], act: Callable[[Options], None], *, has_ranks: bool = True
) -> NoReturn:
    """Be a command: exit code 0, 1 after an error, 75 or 130 after a signal; the same on every rank.

    Args:
        read: from the command line's arguments to options, alike on all ranks. It imports no torch, so that
            `--help` and a mistyped option answer at once.
        act: does what the options say.
        has_ranks: whether it computes; else torch need not be installed.
    """
    try:
        options = _with_user_errors(lambda: _read(read), patience=30.0)
        if not has_ranks:
            _with_user_errors(lambda: act(options), patience=0.0)
            _exit(0)
        _ignore_accelerate_environment()
        set_threads()

        from torch.distributed.elastic.multiprocessing.errors import record

        # Outside of it, so that only what nobody foresaw reaches torchrun's report with a traceback.
        record(_with_user_errors)(lambda: act(options), patience=5.0)
    except SystemExit as leaving:
        _exit(leaving.code)
    except Exception:
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _read(read: Callable[[list[str]], Options]) -> Options:
    """The options, as a rank if srun has started this process as one; the first rank alone prints help."""
    set_ranks_from_srun(os.environ)
    with contextlib.ExitStack() as silent:
        if _environment("RANK") != 0:
            silent.enter_context(contextlib.redirect_stdout(io.StringIO()))
        return read(sys.argv[1:])


def _ignore_accelerate_environment() -> None:
    """Take settings that are not ours out of the environment of this process, and say so."""
    names = [
        name for name in sorted(os.environ) if name.startswith(_ACCELERATE_PREFIXES) and name != _LAYER_CLASS_VARIABLE
    ]
    for name in names:
        del os.environ[name]
    if names and _environment("RANK") == 0:
        print(f"ignored in the environment: {', '.join(names)}; options decide", file=sys.stderr, flush=True)


def _with_user_errors(do: Callable[[], Options], *, patience: float) -> Options:
    """Do it; an error of the user's is spoken and ends the process with 1.

    Ranks that have met agree on who speaks. Before that most errors arise on all ranks alike, and torchrun ends the
    others as soon as one has left. So the first rank of a node speaks and leaves; the rest wait to be ended, and
    speak only if that does not happen. Who lost contact speaks at once: the first rank may be the one that is gone.

    Args:
        do: what to do.
        patience: seconds that another than the first rank waits.
    """
    try:
        return do()
    except Stopped as stopped:
        if _environment("RANK") == 0:
            print(stopped, file=sys.stderr, flush=True)
        raise SystemExit(stopped.exit_code) from None
    except EmbedtrainError as error:
        if error.reporting_rank is not None:
            if error.reporting_rank == _environment("RANK"):
                _print_error(error)
            raise SystemExit(error.exit_code) from None
        if _environment("LOCAL_RANK") != 0 and not isinstance(error, LostContact):
            time.sleep(patience)
        if not isinstance(error, FailedElsewhere) or _environment("RANK") == 0:
            _print_error(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(1) from None


def _print_error(error: EmbedtrainError) -> None:
    rank = _environment("RANK")
    alone = f"rank {rank} on {socket.gethostname()}: " if rank and not isinstance(error, LostContact) else ""
    print(f"{'error: ' if error.exit_code == 1 else ''}{alone}{error}", file=sys.stderr, flush=True)


def _environment(name: str) -> int:
    return int(os.environ.get(name, "0"))


def _exit(code: object) -> NoReturn:
    """End the process without tearing the interpreter down.

    torch's caches keep process groups alive after they were destroyed, and with them gloo's threads. One that
    lets go of its last tensor while the interpreter goes away aborts the process, after all work was done:
    "terminate called without an active exception" (pytorch issues 130345 and 190489).
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
