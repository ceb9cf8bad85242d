"""This process among all ranks: joining the process group, exchanging small objects, failing together."""

import contextlib
import inspect
import ipaddress
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from embedtrain.distributed.collectives import max_over_ranks
from embedtrain.distributed.device import explain_out_of_memory
from embedtrain.distributed.messages import broadcast_value, gather_values
from embedtrain.distributed.srun import interface_for
from embedtrain.distributed.watchdog.peers import agree_on_attempt
from embedtrain.distributed.watchdog.watchdog import (
    MAX_FINISHING,
    Watchdog,
    activity,
    current_activity,
    set_activity,
)
from embedtrain.errors import ConfigError, EmbedtrainError, FailedElsewhere, LostContact
from embedtrain.utils.limits import explain_limits


def stay_on_host(environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen on the loopback interface, unless the environment names others."""
    loopback = interface_for("127.0.0.1")
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment.setdefault("NCCL_SOCKET_IFNAME", loopback)


def open_store(rank: int, size: int, timeout: float, *, is_one_host: bool) -> Store:
    """Connect to the store of MASTER_ADDR and MASTER_PORT; rank 0 hosts it unless torchrun does, on that address only.

    torch listens on all interfaces. So does this function if MASTER_ADDR is not an address of this host, as behind an
    address translation, or is a loopback address by which other hosts cannot reach it.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and port.isdecimal():
        listener = listen(address, int(port), is_one_host=is_one_host)
        if listener is not None:
            return TCPStore(
                address,
                int(port),
                size,
                is_master=True,
                timeout=timedelta(seconds=timeout),
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))  # type: ignore[attr-defined]
    return store  # type: ignore[no-any-return]


def listen(address: str, port: int, *, is_one_host: bool) -> socket.socket | None:
    """A socket that listens on an address of this host; None if that is impossible, or not of use to other hosts."""
    with contextlib.ExitStack() as stack:
        try:
            family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            if not is_one_host and ipaddress.ip_address(target[0]).is_loopback:
                return None
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(socket.SOMAXCONN)
        except (OSError, ValueError):  # torch's own attempt names the reason
            return None
        stack.pop_all()
        return listener


T = TypeVar("T")

PROGRESS_SECONDS = 5.0  # between two signs that a long action of rank 0 goes on
_joined: list["World"] = []  # what this process has joined, by `joined_world`
BACKGROUND_GROUP = "background"  # description of process groups used by other threads than the main one
_POLL_SECONDS = 0.05
# Seconds: NCCL's own time-out does not name the late rank, so the watchdog's must come first.
NCCL_EXTRA_SECONDS = 60.0
# What NCCL's own watchdog does when it sees an error or a time-out: see `nccl_error_handling`.
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# How long NCCL's watchdog then waits: four times the first variable, in which all ranks write what torch's flight
# recorder has seen. Ranks that have seen no error themselves are ended after the second one. By default these are one
# and eight minutes, less than the watchdog gives a checkpoint that is being saved. (Variables of torch 2.13 to 2.15.)
_NCCL_DUMP_MILLISECONDS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_NCCL_HEARTBEAT_SECONDS = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_NCCL_PATIENCE = MAX_FINISHING + 60.0
# Why other values than that of `nccl_error_handling` are worse.
NCCL_ERROR_EFFECTS = {
    "0": "if embedtrain's watchdog fails, a collective whose rank is lost never ends",
    "1": "NCCL aborts its communicators before it ends the process, and may hang in that",
    "2": "training continues with the unfinished result of a collective whose rank is lost",
    "3": "NCCL ends the process before embedtrain has found the lost rank",
}
# 1: "nccl" is ProcessGroupNCCL2, the default from torch 2.15 on; 0: ProcessGroupNCCL.
_USE_NCCL2 = "TORCH_DIST_USE_NCCL2"
# torch 2.13 and later; earlier versions split gloo too, with a warning that it ignores NCCL's options.
_SPLITS_ONE_BACKEND = "backend" in inspect.signature(dist.split_group).parameters

# What gloo (torch 2.13), NCCL and the store raise if another rank is lost or silent.
_LOST = re.compile(
    r"Connection (closed|reset|refused)[\w ]*|Broken pipe|Socket closed|failed to (recv|send)[\w ,]*|"
    r"Timed out waiting \w+|wait timeout after \w+|(client socket|operation|collective)[\w ]* timed out|"
    r"NCCL communicator was aborted|remote process (has )?exit\w*|ncclRemoteError",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class World:
    """This process among all ranks."""

    rank: int  # over all hosts
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # process group of collectives; None is the default group
    # Monitors the other ranks; None without other ranks, or if a test created the process group.
    watchdog: Watchdog | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @contextlib.contextmanager
    def watchdog_guard(self) -> Iterator[None]:
        """Report a failure of the block to the other ranks before enclosing context managers take time to close."""
        with (
            contextlib.nullcontext() if self.watchdog is None else self.watchdog.guard(),
            explain_limits(),
            explain_lost_contact(),
            explain_out_of_memory(self.device, self.local_size),
        ):
            yield

    def new_cpu_group(self, timeout: float) -> "World":
        """The same ranks with a new gloo process group, for use in another thread. Every rank must call it.

        A collective of the group waits up to `timeout` seconds. The caller destroys the group.
        """
        # All ranks are members. Of a smaller gloo group torch would split NCCL's communicator on the other ranks only,
        # and hang, because the communicator is bound to a device.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), group_desc=BACKGROUND_GROUP)
        return replace(self, device=torch.device("cpu"), group=group)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        # An all-reduce of one number instead of dist.barrier(), which guesses a device under NCCL. An NCCL collective
        # only makes the stream wait; reading its result makes this process wait.
        arrived = torch.ones(1, device=self.device)
        dist.all_reduce(arrived, group=self.group)
        arrived.item()

    def broadcast(self, value: T, *types: type) -> T:
        """Rank 0's `value` on every rank; `types` are the dataclasses and enums in it, as in `messages.encode`."""
        return broadcast_value(value, types, self.group)  # type: ignore[no-any-return]

    def gather(self, value: T, *types: type) -> list[T]:
        """Every rank's `value` in rank order, on every rank; `types` as in `broadcast`, the same on every rank."""
        return gather_values(value, types, self.group)

    @contextlib.contextmanager
    def fail_together(self, phase: str) -> Iterator[None]:
        """Run a phase in which a rank may fail on its own; if one fails, all fail with the same message.

        Without this, a rank that raises leaves the others waiting in the next collective until they time out. The block
        must not call collectives, because a failed rank would be missing in them.
        """
        error: Exception | None = None
        previous = current_activity().name
        set_activity(phase)
        try:
            yield
        except OSError as caught:
            # Errors of the user's environment: a full disk, a folder that is a file, a missing permission.
            error = caught
            if caught.strerror:
                path = f": {caught.filename}" if caught.filename else ""
                error = EmbedtrainError(f"{phase} failed: {caught.strerror}{path}")
                error.__cause__ = caught
        except Exception as caught:
            error = caught
        with explain_lost_contact(phase):
            failures = self.gather(None if error is None else (type(error).__name__, str(error)))
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if not failed:
            set_activity(previous)
            return
        if error is not None and (failed[0] == self.rank or failures[failed[0]] != failures[self.rank]):
            raise error
        name, text = failures[failed[0]] or ("", "")
        raise FailedElsewhere(f"rank {failed[0]} failed while {phase}: {name}: {text}") from error

    def run_on_main(self, phase: str, action: Callable[[], None]) -> None:
        """Run a function on rank 0 for as long as it takes, such as an upload. A collective.

        The function runs in a thread, and rank 0 tells the others again and again that it goes on, so that no time-out
        of a collective or of the watchdog limits it. If it fails, all ranks fail as in `fail_together`.
        """
        ended: Future[None] = Future()
        if self.is_main:
            threading.Thread(target=_run, args=(action, ended), name=phase, daemon=True).start()
        with activity(phase), explain_lost_contact(phase):
            while self.broadcast(self.is_main and not wait([ended], timeout=PROGRESS_SECONDS).done):
                set_activity(phase)
        with self.fail_together(phase):
            if self.is_main:
                ended.result()


def _run(action: Callable[[], None], ended: Future[None]) -> None:
    try:
        action()
    except BaseException as error:
        ended.set_exception(error)
    else:
        ended.set_result(None)


@contextlib.contextmanager
def explain_lost_contact(name: str | None = None) -> Iterator[None]:
    """Convert the error of a collective in which another rank is missing into LostContact."""
    try:
        with activity(name) if name else contextlib.nullcontext():
            yield
    except LostContact as error:  # of an inner block: the outer activity is what the user asked for
        raise LostContact(error.reason, name) if name and error.said is None else error from error.__cause__
    except RuntimeError as error:
        match = _LOST.search(str(error))
        if match is None:
            raise
        raise LostContact(match[0].strip(), name) from error


@contextlib.contextmanager
def _explain_missing_interface() -> Iterator[None]:
    """Convert gloo's error about a network interface that does not exist into a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if "Unable to find address for" not in str(error):
            raise
        interfaces = ", ".join(sorted(psutil.net_if_addrs()))
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME')}: {socket.gethostname()} has no such interface "
            f"with an address; set it to one that reaches the other hosts ({interfaces}), or unset it"
        ) from error


class _ProcessUse:
    """Lets one thread at a time use the process group, the models on it, and the state of the process.

    Collectives that two threads start mix, FSDP's units of one model cannot run twice at once, and Hydra's state,
    `sys.stdout` and the environment belong to the process. A forked process has none of the threads of the process
    group, and would wait for them forever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: int | None = None  # that used it first
        self._running = ""  # the outermost call
        self._depth = 0

    @contextlib.contextmanager
    def of_call(self, name: str, *, may_wait: bool) -> Iterator[None]:
        """Run a block in the only thread that does.

        A block that `may_wait` begins when another one of the kind has ended. A ConfigError in a forked process, and if
        any other block runs in another thread.
        """
        if self._process not in (None, os.getpid()):  # before the lock, which may have been held when it was forked
            raise ConfigError(
                f"{name} in a process that was forked from one which has used embedtrain: the threads of its process "
                "group do not exist here; start processes with multiprocessing.get_context('spawn')"
            )
        while not self._lock.acquire(timeout=_POLL_SECONDS if may_wait else 0.0):
            running = self._running  # empty for a moment, while another thread begins or ends a call
            if not may_wait or running not in ("", name):
                raise ConfigError(
                    f"{name} while {running or 'another call'} runs in another thread of this process: "
                    "wait until it has ended, or start another process"
                )
        try:
            self._process = os.getpid()
            self._depth += 1
            if self._depth == 1:
                self._running = name
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._running = ""
            self._lock.release()


PROCESS_USE = _ProcessUse()


def rank_from_environment() -> int:
    """This process's rank as set by the launcher; 0 without a launcher."""
    return _integer("RANK", 0)


def _is_launched(rank: int, size: int) -> bool:
    """Whether a launcher started this process; a ConfigError if its variables contradict each other."""
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size} contradict each other: start with torchrun, or unset both"
        )
    is_launched = "MASTER_ADDR" in os.environ and "RANK" in os.environ
    if size > 1 and not is_launched:
        raise ConfigError(
            f"WORLD_SIZE={size} but RANK or MASTER_ADDR is missing, so this process would train alone: "
            f"start with torchrun, or unset WORLD_SIZE"
        )
    return is_launched


def _local_rank_and_size(rank: int, size: int) -> tuple[int, int]:
    """This process among those of its host, as set by the launcher; a ConfigError if that is missing or impossible."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if size > 1 and missing:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size} but {' and '.join(missing)} missing, so ranks of one host would share "
            "its first GPU: start with torchrun, or set LOCAL_RANK to the number of the rank on its host, from 0, and "
            "LOCAL_WORLD_SIZE to the number of ranks there"
        )
    local_rank, local_size = _integer("LOCAL_RANK", 0), _integer("LOCAL_WORLD_SIZE", 1)
    if not 0 <= local_rank < local_size <= size or local_rank > rank:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size} contradict each other, or RANK={rank} and "
            f"WORLD_SIZE={size}: start with torchrun, or unset them"
        )
    return local_rank, local_size


@contextlib.contextmanager
def _explain_port_in_use(address: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(f"{address} is in use by another program: set another MASTER_PORT") from error


@contextlib.contextmanager
def joined_world(timeout: float = 1800.0) -> Iterator[World]:
    """Join the process group that torchrun prepared, or form a world of one rank; leave it at the end.

    A collective waits up to `timeout` seconds. Raises ConfigError if the launcher's variables contradict each other,
    there are fewer GPUs than local ranks, or the port is taken, and LostContact if another rank is lost.
    """
    rank, size = rank_from_environment(), _integer("WORLD_SIZE", 1)
    is_launched = _is_launched(rank, size)
    local_rank, local_size = _local_rank_and_size(rank, size)
    device, backend = rank_device(local_rank, local_size)
    if _joined:  # by an outer block
        yield _joined[-1]
        return
    if dist.is_initialized():
        yield _world_of_caller(local_rank, local_size, device, backend)
        return
    if size == local_size:
        stay_on_host(os.environ)
    if not is_launched:
        with _single_rank(device, backend) as world:
            yield world
        return
    address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
    joining = f"joining the process group at {address}"
    with _explain_port_in_use(address), explain_lost_contact(joining):
        store = open_store(rank, size, timeout, is_one_host=size == local_size)
        attempt = agree_on_attempt(store, rank, size, timeout)
    local_ranks = range(rank - local_rank, rank - local_rank + local_size)
    watchdog = _start_watchdog(store, attempt, rank, size, local_ranks, timeout)
    world = World(rank, size, local_rank, local_size, device, watchdog=watchdog)
    with world.watchdog_guard():
        with explain_lost_contact(joining), _explain_missing_interface():
            extra = NCCL_EXTRA_SECONDS if watchdog is not None and device.type == "cuda" else 0.0
            init_process_group(
                PrefixStore(f"group/{attempt}", store), rank, size, device, backend, timeout=timeout + extra
            )
        if watchdog is not None:
            watchdog.backend_error = nccl_error
            watchdog.learn_hosts()
        with _current(world):
            yield world
    # Not after an error: destroying a group in which a rank is missing may wait for that rank.
    if watchdog is not None:
        watchdog.close()
    _leave()


@contextlib.contextmanager
def _single_rank(device: torch.device, backend: str) -> Iterator[World]:
    """A world of this process alone."""
    with _explain_missing_interface():
        init_process_group(HashStore(), 0, 1, device, backend)
    world = World(0, 1, 0, 1, device)
    try:
        with _current(world), explain_out_of_memory(device):
            yield world
    finally:
        _leave()


def _leave() -> None:
    dist.destroy_process_group()
    _device_groups.clear()


def _world_of_caller(local_rank: int, local_size: int, device: torch.device, backend: str) -> World:
    """The world of a process group that the program has created."""
    if "cpu:gloo" not in (config := dist.get_backend_config()):
        raise ConfigError(
            f"torch.distributed is initialised with the backend {config}: tensors on the CPU need gloo as well; write "
            f'init_process_group("{backend}"), or leave it out'
        )
    return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device)


@contextlib.contextmanager
def _current(world: World) -> Iterator[None]:
    _joined.append(world)
    try:
        yield
    finally:
        _joined.remove(world)


def _start_watchdog(
    store: Store, attempt: str, rank: int, size: int, local_ranks: range, timeout: float
) -> Watchdog | None:
    """Start the watchdog with its own connection: the process group's threads block theirs for long."""
    if size == 1:
        return None
    connection = PrefixStore(f"watchdog/{attempt}", store.clone())  # type: ignore[attr-defined]
    connection.set_timeout(timedelta(seconds=30))
    store_on_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    watchdog = Watchdog(connection, rank, size, local_ranks, timeout, store_on_rank_0=store_on_rank_0)
    watchdog.start()
    return watchdog


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process; torch has no public function for it (checked on 2.11 to 2.15)."""
    return list(dist.distributed_c10d._world.pg_map)


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What computes the collectives of a device's tensors, without the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def nccl_error() -> str:
    """The error that NCCL has reported for a communicator of this process, if any; callable from any thread."""
    for group in process_groups():
        # The group is being destroyed, or its implementation does not tell. The watchdog's thread has to go on, because
        # it finds lost ranks without NCCL as well.
        with contextlib.suppress(Exception):
            if "nccl" in dist.get_backend_config(group):
                error = _backend(group, torch.device("cuda")).get_error()
                if error.name != "SUCCESS":
                    return f"NCCL: {error.name}"
    return ""


def nccl_error_handling(environment: Mapping[str, str]) -> str:
    """The value of NCCL_ERROR_HANDLING with which the watchdog names a lost rank before NCCL ends the process.

    It is 3, torch's own: NCCL's watchdog ends the process, without naming the lost rank, `_NCCL_PATIENCE` seconds after
    it has seen an error, in which a checkpoint may still be saved. That is the second exit, if the watchdog fails.
    ProcessGroupNCCL2, which is "nccl" from torch 2.15 on, does not wait: with 3 it ends the process within a second,
    so it is 0, with which it only reports the error. Read in torch's sources; it has not run on a GPU.
    """
    default = "1" if torch.__version__ >= "2.15" else "0"  # torch compares it as a version
    return "0" if environment.get(_USE_NCCL2, default) == "1" else "3"


def init_process_group(
    store: Store, rank: int, size: int, device: torch.device, backend: str, *, timeout: float | None = None
) -> None:
    """Create the default process group. A collective, which waits up to `timeout` seconds; None: torch's default.

    A group with NCCL is bound to its device: NCCL then connects at once, so that its errors show at the start, and
    splits its communicator for further groups instead of connecting again.
    """
    has_nccl = "nccl" in backend
    if has_nccl:
        os.environ.setdefault(NCCL_ERROR_HANDLING, nccl_error_handling(os.environ))
        os.environ.setdefault(_NCCL_DUMP_MILLISECONDS, f"{_NCCL_PATIENCE * 1000 / 4:.0f}")
        os.environ.setdefault(_NCCL_HEARTBEAT_SECONDS, f"{_NCCL_PATIENCE:.0f}")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
        device_id=device if has_nccl else None,
    )


# Groups that exist, by what they were made of: a group has threads and connections until the process group is
# destroyed, and a process may load many models.
_device_groups: dict[tuple[Any, ...], dist.ProcessGroup] = {}


def forget_destroyed_groups() -> None:
    """Let go of groups that were destroyed by who made the process group, which this module did not see."""
    existing = process_groups()
    for known in [known for known, group in _device_groups.items() if group not in existing]:
        del _device_groups[known]


def device_group(
    device: torch.device, parts: Sequence[Sequence[int]], name: str, *, in_host_memory: bool = False
) -> dist.ProcessGroup:
    """The process group of this rank's part of all ranks, for tensors on its device. A collective of all ranks.

    It has the backend of the device alone: torch would connect gloo as well, and give it the options of NCCL, of which
    it warns, and with which gloo waits for 30 minutes.

    Args:
        device: of this rank.
        parts: disjoint, and every rank is in one of them. A single part is the default group.
        name: a description, for messages of torch.
        in_host_memory: whether tensors on the CPU are exchanged as well, with the backend that the default group has
            for them.
    """
    default = dist.group.WORLD
    assert default is not None
    if len(parts) == 1:
        return default
    key = (device, tuple(map(tuple, parts)), name, in_host_memory)
    forget_destroyed_groups()
    if key in _device_groups:
        return _device_groups[key]
    backend = dict(part.split(":") for part in dist.get_backend_config().split(","))[device.type]
    limits = _backend(default, device).options  # None of torch's "fake" backend
    options: dict[str, Any] = {
        "timeout": None if limits is None else limits._timeout,  # torch would take ten or thirty minutes
        "group_desc": name,
    }
    ranks = [list(part) for part in parts]
    if default.bound_device_id is None:
        group, _ = dist.new_subgroups_by_enumeration(ranks, backend=None if in_host_memory else backend, **options)
    else:
        if _SPLITS_ONE_BACKEND:
            options["backend"] = backend
        # One collective for all parts, and the only way for ProcessGroupNCCL2.
        group = dist.split_group(split_ranks=ranks, **options)
    assert isinstance(group, dist.ProcessGroup)
    if in_host_memory and _SPLITS_ONE_BACKEND and default.bound_device_id is not None:
        _connect_gloo(group, options["timeout"])
    _device_groups[key] = group
    return group


def _connect_gloo(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Add gloo for tensors on the CPU to a group of GPUs, as torch does where it makes a group with both."""
    store = PrefixStore("host memory", group.get_group_store())
    gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    # Private names, checked on torch 2.13. `ProcessGroup.split_group` would change the options of the default group.
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


def _integer(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable}={text} in the environment is not a number") from None


def rank_device(local_rank: int, local_size: int) -> tuple[torch.device, str]:
    """The device of a rank, which becomes the current one, and its backend. ConfigError for more ranks than GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    by_srun = "TORCHELASTIC_RUN_ID" not in os.environ and _integer("SLURM_GPUS_ON_NODE", 0) >= local_size
    if by_srun and torch.cuda.device_count() == 1:
        local_rank = 0  # srun --gpus-per-task=1 and --gpu-bind show each task only its own GPU
    if local_rank >= torch.cuda.device_count():
        option = "--nproc-per-node" if "TORCHELASTIC_RUN_ID" in os.environ else "srun's --ntasks-per-node"
        raise ConfigError(
            f"this node has {torch.cuda.device_count()} GPU(s) but {local_size} ranks were started on it: "
            f"use {option} {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    # gloo in addition to NCCL, for tensors on the CPU: checkpoints and Python objects.
    return torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"


# The first step is only a rough measure of later ones: work is queued on a GPU ahead of time, and NCCL starts its clock
# when a collective is queued.
_FIRST_STEP_FACTOR = 3.0


class Timeouts:
    """The time-outs of a training run on this rank.

    Args:
        timeout: seconds that ranks wait for each other before the first step and between steps.
        step_timeout: seconds that ranks wait within a step, after the first one that compiles nothing; at most
            `timeout`, at least three times the longest step up to that one.
        num_graphs: how many graphs this rank has compiled so far.
    """

    def __init__(
        self, world: World, timeout: float, step_timeout: float, num_graphs: Callable[[], int] = lambda: 0
    ) -> None:
        self.world, self.timeout, self.step_timeout, self.num_graphs = world, timeout, step_timeout, num_graphs
        self._longest_step: float | None = None  # seconds, of the steps under `timeout`
        self._has_compiled = False  # in the last of these steps
        self._in_sync = False

    def leave_steps(self) -> None:
        """Announce work between steps, which rank 0 may do alone: the next step starts when all ranks have arrived."""
        self._in_sync = False

    @contextlib.contextmanager
    def within_step(self) -> Iterator[None]:
        """Apply the step time-out while the block takes a step. Every rank must enter it."""
        if self._longest_step is not None and not self._in_sync:
            # All ranks must have arrived before any of them applies the shorter time-out. After a step in which one of
            # them has compiled, others may compile the same graph in the next one: their chunks have other forms.
            local = [math.ceil(self._longest_step), int(self._has_compiled)]
            seconds, has_compiled = max_over_ranks(local, self.world.device)
            if not has_compiled:
                self.step_timeout = min(self.timeout, max(self.step_timeout, _FIRST_STEP_FACTOR * seconds))
                self._in_sync = True
                if self.world.watchdog is not None:
                    self.world.watchdog.max_silence = self.step_timeout
        if not self._in_sync:
            started, num_graphs = time.monotonic(), self.num_graphs()
            yield
            self._longest_step = max(self._longest_step or 0.0, time.monotonic() - started)
            self._has_compiled = self.num_graphs() > num_graphs
            return
        _set_timeout(self.world, self.step_timeout)
        yield
        # Not after an error: a lost rank is not waited for any longer.
        _set_timeout(self.world, self.timeout)


def _set_timeout(world: World, seconds: float) -> None:
    """Change the time-out of all process groups.

    gloo and NCCL read a group's time-out when a collective is called.
    """
    if world.watchdog is not None:
        world.watchdog.timeout = seconds
    extra = NCCL_EXTRA_SECONDS if world.watchdog is not None and world.device.type == "cuda" else 0.0
    for group in process_groups():
        if group.group_desc != BACKGROUND_GROUP:
            group.set_timeout(timedelta(seconds=seconds + extra))
