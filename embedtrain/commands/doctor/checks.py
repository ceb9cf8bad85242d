"""Runs all checks: those of each process, those of the process group, and merges the findings of all ranks."""

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from embedtrain.commands.doctor.environment import check_environment, check_services, check_versions
from embedtrain.commands.doctor.host import (
    PER_HOST,
    Finding,
    Level,
    check_devices,
    check_disk,
    check_ports,
    check_shared_disk,
    merge_findings,
)
from embedtrain.data.cache.cache import cache_directory
from embedtrain.distributed.world import World
from embedtrain.utils.formatting import format_count

if TYPE_CHECKING:
    from embedtrain.commands.doctor import DoctorOptions

_SIZES = {"cuda": (1 << 20, 16 << 20, 256 << 20), "cpu": (1 << 16, 1 << 20, 16 << 20)}  # bytes per rank
_MAX_GATHERED = 4 << 30  # bytes of all ranks
_MAX_ROUNDS, _MAX_SECONDS = 5, 3.0
_SLOW = 1.0  # GB/s between hosts with GPUs; below, NCCL probably uses TCP on a slow interface


def check_locally(options: "DoctorOptions", environment: Mapping[str, str]) -> list[Finding]:
    """The checks of one process, without the others, so that they are reported even if ranks cannot join.

    `environment` is that of the process at its start.
    """
    local_rank, local_size = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    # torchrun sets it; srun does not.
    num_hosts = int(environment.get("GROUP_WORLD_SIZE") or -(-int(environment.get("WORLD_SIZE", "1")) // local_size))
    findings = [*check_versions(), *check_devices(local_rank, local_size), *check_environment(environment, num_hosts)]
    if local_rank == 0:  # the other ranks are on the same host
        directories = {"output_dir": Path(options.output_dir), "cache_dir": cache_directory(options.cache_dir)}
        for name, directory in directories.items():
            findings += check_disk(name, directory, measure=not options.quick)
        findings += check_services(environment, ask_hub=options.hub and not options.quick)
    return findings


def check_collectively(options: "DoctorOptions", world: World, local: list[Finding]) -> list[Finding]:
    """The merged findings of all ranks; `local` are this rank's findings of `check_locally`. A collective."""
    hosts = world.gather(socket.gethostname())
    shared = [*check_process_group(world, hosts), *check_ports(world, hosts)]
    if options.quick:
        shared.append(Finding("ranks", "bandwidth", "not measured, because quick=true"))
    else:
        shared += check_bandwidth(world, hosts)
    # Only output_dir: each host may have its own cache.
    shared += check_shared_disk("output_dir", Path(options.output_dir), world, hosts)
    findings = world.gather([*shared, *local] if world.is_main else local, Finding, Level)
    local_ranks = world.gather(world.local_rank)
    # The first rank of a host checks the host for all of its ranks.
    for rank, first in enumerate(hosts.index(host) for host in hosts):
        if local_ranks[rank]:
            findings[rank] = [*findings[rank], *filter(_is_of_host, findings[first])]
    return merge_findings(
        [[*shared, *(finding for finding in local if finding not in shared)] for local in findings], hosts
    )


def _is_of_host(finding: Finding) -> bool:
    return finding.topic in ("disks", "services") or finding.name in PER_HOST


def check_process_group(world: World, hosts: Sequence[str]) -> list[Finding]:
    """Whether a sum over all ranks is correct; `hosts` are by rank. A collective."""
    backend = "NCCL, and gloo for tensors on the CPU" if world.device.type == "cuda" else "gloo"
    text = f"{format_count(world.size, 'rank')} on {format_count(len(set(hosts)), 'host')} joined with {backend}"
    findings = [Finding("ranks", "process group", text)]
    # Different values on every rank, in a size that uses all buffers of a backend.
    values = torch.arange(1 << 20, dtype=torch.float64, device=world.device) % 1024 + world.rank
    dist.all_reduce(values)
    expected = world.size * (torch.arange(1 << 20, dtype=torch.float64, device=world.device) % 1024)
    is_correct = bool(torch.equal(values, expected + world.size * (world.size - 1) / 2))
    if not is_correct:
        do = "Look for a broken cable, switch or GPU: run it on half of the hosts, and with NCCL_P2P_DISABLE=1."
        return [*findings, Finding("ranks", "all-reduce", "the sum over all ranks is wrong", Level.problem, do)]
    return [*findings, Finding("ranks", "all-reduce", "the sum over all ranks is correct")]


def check_bandwidth(world: World, hosts: Sequence[str]) -> list[Finding]:
    """Bandwidth between all ranks, and between the ranks of a host if there are several hosts. A collective.

    In 10^9 bytes per second that each rank sends and receives, like the bus bandwidth of NVIDIA's nccl-tests.
    """
    if world.size == 1:
        return [Finding("ranks", "bandwidth", "not measured, because there is one rank: start with torchrun")]
    findings = []
    if len(set(hosts)) > 1:
        groups: dict[str, dist.ProcessGroup] = {}
        for host in dict.fromkeys(hosts):
            groups[host] = dist.new_group([rank for rank, name in enumerate(hosts) if name == host])
        group = groups[hosts[world.rank]]
        if max(hosts.count(host) for host in groups) > 1:
            rates_of_ranks = world.gather(_measure(world, group, group.size()) if group.size() > 1 else [], _Rate)
            measured = zip(*(rates for rates in rates_of_ranks if rates), strict=True)
            slowest = [min(rates, key=lambda rate: rate.gb_per_s) for rates in measured]
            findings.append(_finding("within a host", slowest))
    rates = _measure(world, dist.group.WORLD, world.size)
    finding = _finding("between hosts" if len(set(hosts)) > 1 else "bandwidth", rates)
    best = max(rate.gb_per_s for rate in rates)
    if world.device.type == "cuda" and len(set(hosts)) > 1 and best < _SLOW:
        do = "NCCL_DEBUG=INFO shows which network it uses; NCCL_SOCKET_IFNAME and NCCL_IB_HCA select one."
        finding = Finding("ranks", finding.name, finding.text, Level.warning, do)
    return [*findings, finding]


@dataclass(frozen=True, slots=True)
class _Rate:
    operation: str
    num_bytes: int  # per rank
    gb_per_s: float


def _finding(name: str, rates: Sequence[_Rate]) -> Finding:
    texts: dict[str, list[str]] = {}
    for rate in rates:
        size = f"{rate.num_bytes >> 20} MiB" if rate.num_bytes >= 1 << 20 else f"{rate.num_bytes >> 10} KiB"
        texts.setdefault(rate.operation, []).append(f"{rate.gb_per_s:.3g} GB/s ({size})")
    return Finding("ranks", name, "; ".join(f"{operation} {', '.join(sizes)}" for operation, sizes in texts.items()))


def _measure(world: World, group: dist.ProcessGroup | None, size: int) -> list[_Rate]:
    rates = []
    for num_bytes in _SIZES[world.device.type]:
        sent = torch.zeros(num_bytes // 4, device=world.device)
        part = sent[: max(1, min(sent.numel(), _MAX_GATHERED // 4 // size))]
        received = torch.empty(size * part.numel(), device=world.device)
        reduce = _seconds(partial(dist.all_reduce, sent, group=group), world, group)
        gather = _seconds(partial(dist.all_gather_into_tensor, received, part, group=group), world, group)
        rates.append(_Rate("all-reduce", num_bytes, 2 * (size - 1) / size * num_bytes / reduce / 1e9))
        rates.append(_Rate("all-gather", 4 * part.numel(), (size - 1) * 4 * part.numel() / gather / 1e9))
    return rates


def _seconds(collective: Callable[[], object], world: World, group: dist.ProcessGroup | None) -> float:
    """The median over several rounds of the slowest rank's time."""
    collective()
    seconds: list[float] = []
    for _ in range(_MAX_ROUNDS):
        _synchronize(world)
        started = time.perf_counter()
        collective()
        _synchronize(world)
        seconds.append(time.perf_counter() - started)
        # Ranks agree on the number of rounds, so that a slow network is not measured for minutes.
        total_and_last = torch.tensor([sum(seconds), seconds[-1]], dtype=torch.float64, device=world.device)
        dist.all_reduce(total_and_last, op=dist.ReduceOp.MAX, group=group)
        seconds[-1] = float(total_and_last[1])
        if float(total_and_last[0]) > _MAX_SECONDS:
            break
    return statistics.median(seconds)


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
