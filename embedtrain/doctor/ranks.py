"""The process group: all ranks meet, a sum over them is right, and how fast bytes travel between them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from embedtrain.distributed.world import World
from embedtrain.doctor.finding import Finding, Level

_TOPIC = "ranks"
SIZES = {"cuda": (1 << 20, 16 << 20, 256 << 20), "cpu": (1 << 16, 1 << 20, 16 << 20)}  # bytes that each rank gives
_MOST_GATHERED = 4 << 30  # bytes that all ranks give together
_ROUNDS, _SECONDS = 5, 3.0
_SLOW = 1.0  # GB/s between hosts with GPUs, below which NCCL is likely to use TCP on a slow interface


def check_process_group(world: World, hosts: Sequence[str]) -> list[Finding]:
    """Who is there, and whether what they add up is right. A collective.

    Args:
        world: the ranks.
        hosts: of each rank.
    """
    backend = "NCCL, and gloo for what lies on the CPU" if world.device.type == "cuda" else "gloo"
    num_hosts = len(set(hosts))
    text = f"{world.size} on {num_hosts} host{'s' * (num_hosts > 1)} have met, by {backend}"
    findings = [Finding(_TOPIC, "process group", text)]
    # Of every rank something else, in a size that goes through all of a backend's buffers.
    given = torch.arange(1 << 20, dtype=torch.float64, device=world.device) % 1024 + world.rank
    dist.all_reduce(given)
    expected = world.size * (torch.arange(1 << 20, dtype=torch.float64, device=world.device) % 1024)
    right = bool(torch.equal(given, expected + world.size * (world.size - 1) / 2))
    if not right:
        do = "Look for a broken cable, switch or GPU: run it again on half of the hosts, and with NCCL_P2P_DISABLE=1."
        return [*findings, Finding(_TOPIC, "all-reduce", "the sum over all ranks is wrong", Level.problem, do)]
    return [*findings, Finding(_TOPIC, "all-reduce", "the sum over all ranks is right")]


def check_bandwidth(world: World, hosts: Sequence[str]) -> list[Finding]:
    """What travels between ranks a second: among all, and among those of a host where there are several. A collective.

    Figures are what each rank sends and what each receives, in 10^9 bytes a second, as NVIDIA's nccl-tests count bus
    bandwidth.
    """
    if world.size == 1:
        return [Finding(_TOPIC, "bandwidth", "not measured, because there is one rank: start with torchrun")]
    findings = []
    if len(set(hosts)) > 1:
        groups = {
            host: dist.new_group([rank for rank, one in enumerate(hosts) if one == host])
            for host in dict.fromkeys(hosts)
        }
        mine = groups[hosts[world.rank]]
        if max(hosts.count(host) for host in groups) > 1:
            found = world.gather(_measured(world, mine, mine.size()) if mine.size() > 1 else [])
            slowest = [min(of, key=lambda one: one.rate) for of in zip(*(rows for rows in found if rows), strict=True)]
            findings.append(_told("within a host", slowest))
    rates = _measured(world, dist.group.WORLD, world.size)
    finding = _told("between hosts" if len(set(hosts)) > 1 else "bandwidth", rates)
    best = max(rate.rate for rate in rates)
    if world.device.type == "cuda" and len(set(hosts)) > 1 and best < _SLOW:
        do = "NCCL_DEBUG=INFO tells which network it uses; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose."
        finding = Finding(_TOPIC, finding.name, finding.text, Level.warning, do)
    return [*findings, finding]


@dataclass(frozen=True, slots=True)
class _Rate:
    what: str
    size: int  # bytes that each rank gives
    rate: float  # GB/s


def _told(name: str, rates: Sequence[_Rate]) -> Finding:
    kinds = dict.fromkeys(rate.what for rate in rates)
    texts = [
        f"{kind} {', '.join(f'{one.rate:.3g} GB/s ({_size(one.size)})' for one in rates if one.what == kind)}"
        for kind in kinds
    ]
    return Finding(_TOPIC, name, "; ".join(texts))


def _measured(world: World, group: dist.ProcessGroup | None, size: int) -> list[_Rate]:
    rates = []
    for num_bytes in SIZES[world.device.type]:
        given = torch.zeros(num_bytes // 4, device=world.device)
        part = given[: max(1, min(given.numel(), _MOST_GATHERED // 4 // size))]
        taken = torch.empty(size * part.numel(), device=world.device)
        reduce = _seconds(partial(dist.all_reduce, given, group=group), world, group)
        gather = _seconds(partial(dist.all_gather_into_tensor, taken, part, group=group), world, group)
        rates.append(_Rate("all-reduce", num_bytes, 2 * (size - 1) / size * num_bytes / reduce / 1e9))
        rates.append(_Rate("all-gather", 4 * part.numel(), (size - 1) * 4 * part.numel() / gather / 1e9))
    return rates


def _seconds(do: Callable[[], object], world: World, group: dist.ProcessGroup | None) -> float:
    """The median of some rounds, the slowest rank's."""
    do()
    took: list[float] = []
    for _ in range(_ROUNDS):
        _finish(world)
        began = time.perf_counter()
        do()
        _finish(world)
        took.append(time.perf_counter() - began)
        # Ranks agree on how many rounds there are: a slow network is not measured for minutes.
        box = torch.tensor([sum(took), took[-1]], dtype=torch.float64, device=world.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
        took[-1] = float(box[1])
        if float(box[0]) > _SECONDS:
            break
    return statistics.median(took)


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
