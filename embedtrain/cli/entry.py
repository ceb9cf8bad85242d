"""The entry of every command: options, threads, errors as one sentence, and the exit code."""

import atexit
import contextlib
import faulthandler
import io
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn, TypeVar

from embedtrain.config.command_line import join_help_topic
from embedtrain.config.commands import Command
from embedtrain.config.launch import Launch, split_launch_options
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.srun import set_ranks_from_srun
from embedtrain.distributed.watchdog.launcher import stop_after_launcher
from embedtrain.errors import ConfigError, EmbedtrainError, FailedElsewhere, LostContact, Stopped
from embedtrain.utils.files import temporary_home
from embedtrain.utils.formatting import format_count, mask_passwords, printable, shorten_message
from embedtrain.utils.limits import explain_limits, num_usable_cores, raise_open_files, report_low_limits
from embedtrain.utils.streams import SafeStream, protect_standard_streams

Options = TypeVar("Options")
Result = TypeVar("Result")

# Variables that accelerate's launcher sets. transformers reads them too whenever it loads a model: with
# ACCELERATE_USE_FSDP and FSDP_CPU_RAM_EFFICIENT_LOADING every rank but the first would get a model without weights.
_ACCELERATE_PREFIXES = ("ACCELERATE_", "FSDP_")
_LAYER_CLASS_VARIABLE = "FSDP_TRANSFORMER_CLS_TO_WRAP"  # the sharding reads it, and reports that it does


def run_command(
    compose: Callable[[list[str]], Options],
    main: Callable[[Options], object],
    *,
    has_ranks: bool = True,
    needs_output: bool = True,
    launches: str | None = None,
) -> NoReturn:
    """Run a command and end the process: exit code 0, 1 after an error, 75 or 130 after a signal, alike on all ranks.

    `compose` turns the command line into options; it imports no torch, so that `--help` and mistyped options answer at
    once. A command without ranks does not compute and does not need torch. A command that needs its output ends with
    exit code 1 if the output cannot be written because a disk is full, not if its terminal or reader has gone.
    `launches` is its name, if it has the options of the launcher, which start it on several ranks.
    """
    # Before torch is imported: a crash in native code prints where each thread was. Standard error itself, because the
    # stream may be replaced.
    faulthandler.enable(file=2)
    protect_standard_streams()
    try:
        _with_user_errors(_prepare_process, delay=5.0)
        options, arguments, launch = _with_user_errors(lambda: _compose_as_rank(compose, launches), delay=30.0)
        # Processes that libraries start do not look for modules in the working directory either: it may hold data.
        os.environ.setdefault("PYTHONSAFEPATH", "1")
        if not has_ranks:
            _with_user_errors(lambda: main(options), delay=0.0)
            _exit(0)
        set_allocator()
        set_kernel_cache()
        if launch is not None and launches is not None:
            _with_user_errors(lambda: _run_ranks(launches, arguments, launch), delay=0.0)
        ignore_accelerate_environment()
        set_threads()

        # `record` wraps the handler of expected errors, so that only unexpected ones reach torchrun's error report.
        record = _with_user_errors(_import_record, delay=5.0)
        record(_with_user_errors)(lambda: main(options), delay=5.0)
        _exit(0, needs_output=needs_output)
    except SystemExit as error:
        _exit(error.code)
    except Exception:
        traceback.print_exc()
        _exit(1)


def run_named(find: Callable[[], Command], *, on_all_gpus: bool = False) -> NoReturn:
    """Run the command that `find` finds, with the arguments of the process, which may begin with its name.

    With `on_all_gpus` one that has ranks starts one on each GPU, unless its arguments say how many.
    """
    protect_standard_streams()
    command = _with_user_errors(find, delay=5.0)
    if sys.argv[1:2] == [command.name]:
        del sys.argv[1]
    if on_all_gpus and command.ranks and not any(word.startswith(("--gpus", "--nproc")) for word in sys.argv[1:]):
        sys.argv.insert(1, "--gpus=auto")
    signals = StopSignals()

    def compose(arguments: list[str]) -> Any:
        if command.saves_on_signal:
            signals.listen()
        options = command.compose(arguments)
        command.require_paths(options)
        return options

    def run(options: Any) -> None:
        command.run(options, *([signals] if command.saves_on_signal else []))

    # A scheduler would repeat a finished training whose log did not fit on the disk.
    run_command(
        compose,
        run,
        has_ranks=command.computes,
        needs_output=not command.saves_on_signal,
        launches=command.name if command.ranks else None,
    )


def _prepare_process() -> None:
    raise_open_files()
    report_low_limits()
    set_home()
    stop_after_launcher()


def _import_record() -> Callable[..., Any]:
    from torch.distributed.elastic.multiprocessing.errors import record

    return record


def set_home(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give a user without a home directory one that is temporary, and report it.

    Libraries would keep their caches in a folder named `~` of the working directory.
    """
    if not os.path.isabs(os.path.expanduser("~")):
        environment["HOME"] = str(temporary_home())
        if _environment("RANK") == 0:
            note = (
                f"there is no home directory: libraries keep their caches in {environment['HOME']}; HOME names another"
            )
            print(note, file=sys.stderr, flush=True)


def quiet_hub(environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave warnings of the Hub, as about requests without a token, to other processes; the user's setting stays.

    Each process warns once, so each rank would repeat the line. It runs before huggingface_hub is imported.
    """
    environment.setdefault("HF_HUB_VERBOSITY", "error")


def set_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Divide the cores of a machine among its ranks, and let waiting threads sleep; the user's settings stay.

    It runs before torch is loaded, because OpenMP reads its environment at that moment. torchrun sets one thread per
    rank; ranks that srun or others start would each use all cores. Threads that spin at a barrier while another rank
    needs their core slow all of them down (6.8 times, measured with two threads on two cores beside another process).
    """
    ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 2:  # an invalid number is reported when the process group is created
        return
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_usable_cores() // int(ranks))))


def set_allocator(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's allocator of GPU memory grow its segments, unless the user has configured it.

    Chunks differ in size, so segments of a fixed size become fragmented, and most of the memory is planned. torch reads
    the older of the two names first (2.11 to 2.15).
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def set_kernel_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Limit the matrix products of a CPU whose kernels oneDNN keeps, unless the user has configured it.

    It keeps 1,024 by default, one for each size of a product. Chunks differ in size, so few are used again after their
    step, and the memory of a rank grows for hundreds of steps.
    """
    if not {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"} & environment.keys():
        environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "16"


def _compose_as_rank(
    compose: Callable[[list[str]], Options], launches: str | None
) -> tuple[Options, list[str], Launch | None]:
    """The options, after srun's variables have become those of torchrun; only rank 0 prints help.

    Also returns the arguments without the launcher's options, and those; a process that starts ranks composes as well,
    so that mistakes are reported at once.
    """
    set_ranks_from_srun(os.environ)
    if _environment("RANK") != 0:
        quiet_hub()
    launch, arguments = None, join_help_topic(sys.argv[1:])
    if launches is not None:
        launch, arguments = split_launch_options(arguments)
    with contextlib.ExitStack() as stack:
        if _environment("RANK") != 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        return compose(arguments), arguments, launch


def _run_ranks(command: str, arguments: list[str], launch: Launch) -> None:
    """Start the ranks and exit when they have ended; return if a single rank is to run, which needs no launcher."""
    count = num_ranks(launch)
    # At once, because importing torch on a busy machine takes a minute, and nothing else is printed meanwhile.
    where = f" on node {launch.node_rank} of {launch.nodes}" if launch.nodes > 1 else ""
    print(f"starting {format_count(count, 'rank')}{where}", file=sys.stderr, flush=True)
    if count * launch.nodes > 1:
        from embedtrain.distributed.launch import run_ranks

        quiet_hub()  # this process has composed the options, and warned
        raise SystemExit(run_ranks("embedtrain", [command, *arguments], launch, count))


def ignore_accelerate_environment() -> None:
    """Remove accelerate's settings from the environment of this process, and report it."""
    names = [
        name for name in sorted(os.environ) if name.startswith(_ACCELERATE_PREFIXES) and name != _LAYER_CLASS_VARIABLE
    ]
    for name in names:
        del os.environ[name]
    if names and _environment("RANK") == 0:
        print(f"ignored in the environment: {', '.join(names)}; options decide", file=sys.stderr, flush=True)


def _with_user_errors(function: Callable[[], Result], *, delay: float) -> Result:
    """Call the function; print an error meant for the user, and exit.

    In a process group the ranks agree on the one that reports. Before there is one, most errors occur on all ranks
    alike, and torchrun ends the others as soon as one exits. So the first rank of a node reports and exits; the others
    wait to be ended, and report only if that does not happen. A rank that lost contact reports at once: the first
    rank may be the one that is lost.
    """
    try:
        with explain_limits():
            return function()
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
            time.sleep(delay)
        if not isinstance(error, FailedElsewhere) or _environment("RANK") == 0:
            _print_error(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(1) from None


def _print_error(error: EmbedtrainError) -> None:
    rank = _environment("RANK")
    origin = f"rank {rank} on {socket.gethostname()}: " if rank and not isinstance(error, LostContact) else ""
    print(
        f"{'error: ' if error.exit_code == 1 else ''}{origin}{shorten_message(printable(mask_passwords(str(error))))}",
        file=sys.stderr,
        flush=True,
    )


def _environment(name: str) -> int:
    return int(os.environ.get(name, "0"))


def _exit(code: object, *, needs_output: bool = True) -> NoReturn:
    """End the process without finalizing the interpreter.

    torch's caches keep process groups alive after they were destroyed, and with them gloo's threads. A thread that
    releases its last tensor during finalization aborts the process after all work was done: "terminate called without
    an active exception" (pytorch issues 130345 and 190489).
    """
    atexit._run_exitfuncs()
    number = code if isinstance(code, int) else int(code is not None)
    sys.stdout.flush()
    if isinstance(sys.stdout, SafeStream) and sys.stdout.error is not None:
        reason = sys.stdout.error.strerror or sys.stdout.error
        level = "error" if needs_output else "warning"
        print(f"{level}: standard output cannot be written: {reason}", file=sys.stderr)
        number = number or int(needs_output)
    sys.stderr.flush()
    os._exit(number)


def num_ranks(launch: Launch) -> int:
    """The number of ranks of this node."""
    if launch.processes is not None:
        return launch.processes
    visible = num_visible_gpus()
    if launch.gpus > visible:
        raise ConfigError(
            f"--gpus {launch.gpus}: this node has {format_count(visible, 'visible GPU')}"
            + ("" if visible else f"; --nproc-per-node {launch.gpus} starts ranks on the CPU")
        )
    return launch.gpus or max(1, visible)


def num_visible_gpus() -> int:
    """The number of GPUs that torch sees; without a driver it is not asked, because importing it takes seconds."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd"))):
        return 0
    import torch

    return torch.cuda.device_count()
