"""Who we are among the ranks: joining the process group, agreeing with the others, failing together."""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from embedtrain.distributed.watchdog.activity import activity, current_activity, note
from embedtrain.distributed.watchdog.attempt import agree_on_attempt
from embedtrain.distributed.watchdog.watchdog import Watchdog
from embedtrain.errors import ConfigError, EmbedtrainError, FailedElsewhere, LostContact

T = TypeVar("T")

BACKGROUND_GROUP = "apart"  # describes the groups that threads beside the main one use
NCCL_EXTRA_SECONDS = (
    60.0  # seconds: its own time-out kills the process without a word of who was late, ours comes first
)

# What gloo (torch 2.13), NCCL and the store say when another rank is gone or silent.
_LOST = re.compile(
    r"Connection (closed|reset|refused)[\w ]*|Broken pipe|Socket closed|failed to (recv|send)[\w ,]*|"
    r"Timed out waiting \w+|wait timeout after \w+|(client socket|operation|collective)[\w ]* timed out|"
    r"NCCL communicator was aborted|remote process (has )?exit\w*|ncclRemoteError",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class World:
    """This process among all of them.

    `rank` counts over all nodes, `local_rank` within this node; `device` is where this rank computes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # that collectives run in; None: the one of all
    watch: Watchdog | None = None  # over the other ranks; None where there are none, or a test made the group

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks and writes."""
        return self.rank == 0

    @contextlib.contextmanager
    def watchdog_guard(self) -> Iterator[None]:
        """Tell the others at once when the block fails here, before what is open around it takes its time to close.

        Raises:
            LostContact: another rank ended or stopped answering.
        """
        with contextlib.nullcontext() if self.watch is None else self.watch.guard(), explain_lost_contact():
            yield

    def new_cpu_group(self, timeout: float) -> "World":
        """The same ranks with a process group of their own, on the host: for a thread beside the main one.

        Every rank must call. Whoever asked destroys the group.

        Args:
            timeout: seconds that a rank waits in a collective of it.
        """
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), group_desc=BACKGROUND_GROUP)
        return replace(self, device=torch.device("cpu"), group=group)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        # An all-reduce of one number rather than dist.barrier(): the latter guesses a device under NCCL.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank. Values are pickled: small Python objects only."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=self.device)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value` in rank order, on every rank. Values are pickled: small objects only."""
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value, group=self.group)
        return boxes

    @contextlib.contextmanager
    def fail_together(self, phase: str) -> Iterator[None]:
        """Run a phase in which a rank may fail on its own; when one fails, all do, with the same words.

        Without this a rank that raises leaves the others waiting in the next collective until they time
        out. No collective may run inside, or the failed rank would be missing in it.

        Raises:
            EmbedtrainError: the error of the first rank that failed; the other ranks' message names it.
        """
        error: Exception | None = None
        before = current_activity().what
        note(phase)
        try:
            yield
        except OSError as caught:
            # Not for programmers: a disk that is full, a folder that is a file, a permission that is missing.
            error = caught
            if caught.strerror:
                place = f": {caught.filename}" if caught.filename else ""
                error = EmbedtrainError(f"{phase} failed: {caught.strerror}{place}")
                error.__cause__ = caught
        except Exception as caught:
            error = caught
        with explain_lost_contact(phase):
            failures = self.gather(None if error is None else (type(error).__name__, str(error)))
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if not failed:
            note(before)
            return
        if error is not None and (failed[0] == self.rank or failures[failed[0]] != failures[self.rank]):
            raise error
        name, text = failures[failed[0]] or ("", "")
        raise FailedElsewhere(f"rank {failed[0]} failed while {phase}: {name}: {text}") from error


@contextlib.contextmanager
def explain_lost_contact(what: str | None = None) -> Iterator[None]:
    """Turn what a collective raises when another rank is gone into one sentence.

    Args:
        what: is being done, such as "evaluating dev"; None where nobody knows.

    Raises:
        LostContact: another rank ended or stopped answering.
    """
    try:
        with activity(what) if what else contextlib.nullcontext():
            yield
    except LostContact as error:  # from within: what the user asked for says more than a step of it
        raise LostContact(error.reason, what) if what and error.said is None else error from error.__cause__
    except RuntimeError as error:
        found = _LOST.search(str(error))
        if found is None:
            raise
        raise LostContact(found[0].strip(), what) from error


@contextlib.contextmanager
def _on_an_interface() -> Iterator[None]:
    """Say in plain words that gloo was told to use an interface that is not there."""
    try:
        yield
    except RuntimeError as error:
        if "Unable to find address for" not in str(error):
            raise
        there = ", ".join(sorted(psutil.net_if_addrs()))
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME')}: {socket.gethostname()} has no such interface "
            f"with an address; name one that reaches the other hosts ({there}), or unset it"
        ) from error


def rank_from_environment() -> int:
    """This process's rank as the launcher set it; 0 where there is no launcher."""
    return _number("RANK", 0)


@contextlib.contextmanager
def joined_world(timeout: float = 1800.0) -> Iterator[World]:
    """Join the process group that torchrun prepared, or be a world of one; leave it at the end.

    Args:
        timeout: seconds that a rank waits in a collective before it gives up.

    Raises:
        ConfigError: the launcher's variables contradict each other, or there are fewer GPUs than local
            ranks, or the port is taken.
        LostContact: another rank ended or stopped answering meanwhile.
    """
    rank, size = rank_from_environment(), _number("WORLD_SIZE", 1)
    local_rank, local_size = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={size} contradict each other: start with torchrun, or unset both"
        )
    if size > 1 and not ("MASTER_ADDR" in os.environ and "RANK" in os.environ):
        raise ConfigError(
            f"WORLD_SIZE={size} but RANK or MASTER_ADDR is missing, so this process would train alone: "
            f"start with torchrun, or unset WORLD_SIZE"
        )
    device, backend = _device(local_rank, local_size)
    if dist.is_initialized():  # a test or a notebook that made its own group
        yield World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device)
        return
    if not ("MASTER_ADDR" in os.environ and "RANK" in os.environ):
        with _on_an_interface():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        try:
            yield World(rank, size, local_rank, local_size, device)
        finally:
            dist.destroy_process_group()
        return
    place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
    patience = timedelta(seconds=timeout)
    try:
        with explain_lost_contact(f"meeting the others at {place}"):
            shared, _, _ = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
            attempt = agree_on_attempt(shared, rank, size, timeout)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(f"{place} is in use by another program: set another MASTER_PORT") from error
    watch = _watch(shared, attempt, rank, size, range(rank - local_rank, rank - local_rank + local_size), timeout)
    world = World(rank, size, local_rank, local_size, device, watch=watch)
    with world.watchdog_guard():
        with explain_lost_contact(f"meeting the others at {place}"), _on_an_interface():
            longer = timedelta(seconds=NCCL_EXTRA_SECONDS if watch is not None and device.type == "cuda" else 0)
            dist.init_process_group(
                backend,
                store=PrefixStore(f"group/{attempt}", shared),
                rank=rank,
                world_size=size,
                timeout=patience + longer,
            )
        if watch is not None:
            watch.learn_hosts()
        yield world
    # Not after an error: a group in which a rank is missing may wait for it while it is taken down.
    if watch is not None:
        watch.close()
    dist.destroy_process_group()


def _watch(store: Store, attempt: str, rank: int, size: int, local: range, timeout: float) -> Watchdog | None:
    """Over the other ranks, by a connection of its own: the group's threads hold the other for long."""
    if size == 1:
        return None
    new_cpu_group = PrefixStore(f"watch/{attempt}", store.clone())  # type: ignore[attr-defined]
    new_cpu_group.set_timeout(timedelta(seconds=30))
    store_on_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    watch = Watchdog(new_cpu_group, rank, size, local, timeout, store_on_rank_0=store_on_rank_0)
    watch.start()
    return watch


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable}={text} in the environment is not a number") from None


def _device(local_rank: int, local_size: int) -> tuple[torch.device, str]:
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    by_srun = "TORCHELASTIC_RUN_ID" not in os.environ and _number("SLURM_GPUS_ON_NODE", 0) >= local_size
    if by_srun and torch.cuda.device_count() == 1:
        local_rank = 0  # srun --gpus-per-task=1 and --gpu-bind show each task its own GPU alone
    if local_rank >= torch.cuda.device_count():
        option = "--nproc-per-node" if "TORCHELASTIC_RUN_ID" in os.environ else "srun's --ntasks-per-node"
        raise ConfigError(
            f"this node has {torch.cuda.device_count()} GPU(s) but {local_size} ranks were started on it: "
            f"use {option} {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    # gloo beside NCCL serves what lies on the CPU: checkpoints and Python objects.
    return torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
