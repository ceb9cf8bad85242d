"""What ranks know of each other before they share a process group: the name of this start, hosts and processes."""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]

from embedtrain.errors import ConfigError, LostContact

_POLL_SECONDS = 0.05


def agree_on_attempt(store: Store, rank: int, size: int, timeout: float) -> str:
    """Return a name that the processes of this start share, and no others. Every rank must call it.

    torchrun keeps its store when it restarts all ranks, so the store still holds entries of earlier ranks. Its restart
    count (TORCHELASTIC_RESTART_COUNT) does not identify a start: each host counts separately, and a host that restarts
    its ranks because those of another host failed does not increment it (torch 2.13). Ranks that used the count as a
    name read the failure that ended the previous start, and ended as well.

    Each rank announces itself under a fresh id. Rank 0 answers every id that it has not answered yet, until all ranks
    have confirmed or `timeout` seconds have passed. No rank of an earlier start can confirm: a launcher ends all ranks
    before it starts new ones.
    """
    own_id = uuid.uuid4().hex
    if rank:
        store.set(f"attempt/of/{rank}", own_id)
        try:
            store.wait([f"attempt/for/{own_id}"], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise _timed_out("rank 0", rank, timeout) from error
        token = store.get(f"attempt/for/{own_id}").decode()
        store.set(f"attempt/heard/{token}/{rank}", "")
        return token
    missing, answered, deadline = set(range(1, size)), set[str](), time.monotonic() + timeout
    while missing:
        for other in sorted(missing):
            if store.check([f"attempt/heard/{own_id}/{other}"]):
                missing.discard(other)
            elif store.check([f"attempt/of/{other}"]):
                other_id = store.get(f"attempt/of/{other}").decode()
                if other_id not in answered:
                    store.set(f"attempt/for/{other_id}", own_id)
                    answered.add(other_id)
        if missing and time.monotonic() > deadline:
            raise _timed_out(format_ranks(sorted(missing)), rank, timeout)
        time.sleep(_POLL_SECONDS)
    return own_id


def _timed_out(missing: str, rank: int, timeout: float) -> LostContact:
    message = (
        f"rank {rank} on {socket.gethostname()} waited {timeout:.0f} s for {missing} while joining the process group: "
        f"see the output of {missing}"
    )
    return LostContact(f"{missing} did not join", said=message)


@dataclass(slots=True)
class LocalProcesses:
    """The processes of the other ranks on this host; may be used from any thread."""

    store: Store
    rank: int
    local: range
    _processes: dict[int, psutil.Process] = field(default_factory=dict)
    _unidentified: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # never held while the store is asked

    def __post_init__(self) -> None:
        self._unidentified = set(self.local) - {self.rank}
        process = psutil.Process()
        who = [_pid_namespace(), process.pid, process.create_time(), self.local.start, self.local.stop]
        self.store.set(f"who/{self.rank}", json.dumps(who))

    def ended(self) -> list[int]:
        """Ranks whose process has ended, in order."""
        self._identify()
        with self._lock:
            self._ended |= {rank for rank, process in self._processes.items() if not _runs(process)}
            return sorted(self._ended)

    def runs(self, rank: int) -> bool:
        """Whether the process of a rank is known and running."""
        with self._lock:
            process = self._processes.get(rank)
        return process is not None and _runs(process)

    def describe(self, ranks: Sequence[int]) -> str:
        """The state of known processes: `, its process 123 is suspended`."""
        states = []
        with self._lock:
            processes = [self._processes[rank] for rank in ranks if rank in self._processes]
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):  # it ends meanwhile; no file can be opened
                if (status := process.status()) != psutil.STATUS_ZOMBIE and process.is_running():
                    state = "suspended" if status == psutil.STATUS_STOPPED else "running"
                    states.append(f", its process {process.pid} is {state}")
        return "".join(states)

    def _identify(self) -> None:
        """Look up the processes of ranks that have published their ids since the last call."""
        with self._lock:
            unidentified = sorted(self._unidentified)
        with contextlib.suppress(RuntimeError):  # the store is lost
            for rank in unidentified:
                if self.store.check([f"who/{rank}"]):
                    self._add(rank, *json.loads(self.store.get(f"who/{rank}")))

    def _add(self, rank: int, namespace: str, pid: int, created: float, *_local: int) -> None:
        process = None
        try:
            if namespace == _pid_namespace():
                process = psutil.Process(pid)
                if process.create_time() != created:
                    raise psutil.NoSuchProcess(pid)
        except psutil.NoSuchProcess:
            with self._lock:
                self._ended.add(rank)
        except OSError:  # this process has reached its limit of open files: at the next call
            return
        with self._lock:
            self._unidentified.discard(rank)
            if process is not None and rank not in self._ended:
                self._processes[rank] = process


def hosts_by_rank(store: Store, rank: int, size: int) -> list[str]:
    """The host of every rank, in rank order, after all ranks have published theirs. Every rank must call it.

    Rank 0 collects the hosts: if all ranks did, the number of requests would be quadratic in the number of ranks.
    Raises the same ConfigError on every rank if ranks are on other hosts than LOCAL_RANK and LOCAL_WORLD_SIZE say.
    """
    if rank == 0:
        published = [json.loads(text) for text in store.multi_get([f"who/{other}" for other in range(size)])]
        hosts = [namespace.partition(" ")[0] for namespace, *_ in published]
        ranges = [range(*local) for _namespace, _pid, _created, *local in published]
        store.set("hosts", json.dumps([hosts, _contradiction(hosts, ranges)]))
    hosts, contradiction = json.loads(store.get("hosts"))
    if contradiction:
        raise ConfigError(contradiction)
    return list(hosts)


def _contradiction(hosts: Sequence[str], ranges: Sequence[range]) -> str:
    """Why ranks are not on the hosts that `ranges`, the ranks of each rank's host, say; empty if they are."""
    for rank, local in enumerate(ranges):
        there = [other for other in local if other < len(hosts)]
        if len(there) < len(local) or any(hosts[other] != hosts[rank] for other in there):
            found = format_ranks(range(len(hosts)), hosts)
            return (
                f"LOCAL_RANK={rank - local.start} and LOCAL_WORLD_SIZE={len(local)} of rank {rank} mean that ranks "
                f"{local.start} to {local.stop - 1} are on one host, but there are {found}: the ranks of a host have "
                f"consecutive numbers; start with torchrun or srun, or with mpirun --map-by ppr:{len(local)}:node"
            )
    return ""


def format_ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """`rank 1 on node7`, `ranks 1, 2 on node7, ranks 8, 9 on node8`; without hosts, only the ranks."""
    if not hosts:
        return _format_numbers(ranks)
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    names = [f"{_format_numbers(numbers)} on {host}" for host, numbers in by_host.items()]
    return f"{', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"


def _format_numbers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' and more' if len(ranks) > 8 else ''}"


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except OSError:  # unknown: this process has reached its limit of open files
        return True


def _pid_namespace() -> str:
    """Where process ids are unique: the host and its pid namespace."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()
