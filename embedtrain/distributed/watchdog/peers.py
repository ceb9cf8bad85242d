"""Where the other ranks are, and the processes of those on this node, which can be looked at without a collective."""

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(slots=True)
class LocalProcesses:
    """The processes of the other ranks on this node, which can be looked at.

    Args:
        store: where each rank says who it is.
        rank: this one.
        local: the ranks of this node.
    """

    store: Store
    rank: int
    local: range
    _processes: dict[int, psutil.Process] = field(default_factory=dict)
    _unknown: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._unknown = set(self.local) - {self.rank}
        me = psutil.Process()
        self.store.set(f"who/{self.rank}", json.dumps([_place(), me.pid, me.create_time()]))

    def gone(self) -> list[int]:
        """Ranks whose process has ended, in order."""
        self._look_up()
        self._gone |= {rank for rank, process in self._processes.items() if not _runs(process)}
        return sorted(self._gone)

    def runs(self, rank: int) -> bool:
        """Whether the rank's process is seen to run."""
        return rank in self._processes and _runs(self._processes[rank])

    def told(self, ranks: Sequence[int]) -> str:
        """What is seen of silent processes: `, process 123 is suspended`."""
        seen = []
        for rank in ranks:
            if self.runs(rank):
                process = self._processes[rank]
                suspended = process.status() == psutil.STATUS_STOPPED
                seen.append(f", its process {process.pid} is {'suspended' if suspended else 'there'}")
        return "".join(seen)

    def _look_up(self) -> None:
        """Find the processes of ranks that have said who they are by now."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            for rank in sorted(self._unknown):
                if self.store.check([f"who/{rank}"]):
                    self._unknown.discard(rank)
                    self._find(rank, *json.loads(self.store.get(f"who/{rank}")))

    def _find(self, rank: int, place: str, pid: int, created: float) -> None:
        if place != _place():
            return
        try:
            process = psutil.Process(pid)
            if process.create_time() != created:
                raise psutil.NoSuchProcess(pid)
        except psutil.NoSuchProcess:
            self._gone.add(rank)
        else:
            self._processes[rank] = process


def hosts_by_rank(store: Store, rank: int, size: int) -> list[str]:
    """The host of every rank, in rank order, once all have said who they are. Every rank must ask.

    The first rank collects: that all ranks did would be as many questions as the square of their number.
    """
    if rank == 0:
        who = store.multi_get([f"who/{other}" for other in range(size)])
        store.set("hosts", json.dumps([json.loads(one)[0].partition(" ")[0] for one in who]))
    return list(json.loads(store.get("hosts")))


def format_ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Ranks in words: "rank 1 on node7", "ranks 1, 2 on node7, ranks 8, 9 on node8".

    Args:
        ranks: which.
        hosts: of every rank, as far as they are known.
    """
    if not hosts:
        return _numbers(ranks)
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    told = [f"{_numbers(found)} on {host}" for host, found in by_host.items()]
    return f"{', '.join(told[:4])}{' and more' if len(told) > 4 else ''}"


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' and more' if len(ranks) > 8 else ''}"


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _place() -> str:
    """Where process ids mean the same: the host and its namespace of processes."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()
