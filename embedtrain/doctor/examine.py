"""All findings of all ranks, in order: what needs no other rank first, so that it is told where ranks cannot meet."""

import socket
from collections.abc import Mapping
from pathlib import Path

from embedtrain.data.cache.cache import cache_directory
from embedtrain.distributed.world import World
from embedtrain.doctor.devices import OF_HOST, check_devices
from embedtrain.doctor.disks import check_disk, check_shared_disk
from embedtrain.doctor.environment import check_environment
from embedtrain.doctor.finding import Finding, merged
from embedtrain.doctor.options import DoctorOptions
from embedtrain.doctor.ranks import check_bandwidth, check_process_group
from embedtrain.doctor.services import check_services
from embedtrain.doctor.versions import check_versions


def check_locally(options: DoctorOptions, environment: Mapping[str, str]) -> list[Finding]:
    """What one process finds without the others.

    Args:
        options: of the command.
        environment: of the process, as it was started.
    """
    local_rank, local_size = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    # Of torchrun; srun tells no such number.
    num_hosts = int(environment.get("GROUP_WORLD_SIZE") or -(-int(environment.get("WORLD_SIZE", "1")) // local_size))
    findings = [
        *check_versions(),
        *check_devices(local_rank, local_size),
        *check_environment(environment, num_hosts),
    ]
    if local_rank == 0:  # the others are on the same host
        for name, folder in _folders(options).items():
            findings += check_disk(name, folder, measure=not options.quick)
        findings += check_services(environment, ask_hub=options.hub and not options.quick)
    return findings


def check_collectively(options: DoctorOptions, world: World, alone: list[Finding]) -> list[Finding]:
    """What all ranks find, told once. A collective.

    Args:
        options: of the command.
        world: the ranks.
        alone: what this rank has found by itself.
    """
    hosts = world.gather(socket.gethostname())
    together = check_process_group(world, hosts)
    if options.quick:
        together.append(Finding("ranks", "bandwidth", "not measured, because quick=true"))
    else:
        together += check_bandwidth(world, hosts)
    # The cache may well be each host's own.
    together += check_shared_disk("output_dir", Path(options.output_dir), world, hosts)
    found = world.gather([*together, *alone] if world.is_main else alone)
    local = world.gather(world.local_rank)
    # What the first rank of a host looked at for all of them holds for all of them.
    for rank, first in enumerate(hosts.index(host) for host in hosts):
        if local[rank]:
            of_host = [one for one in found[first] if one.topic in ("disks", "services") or one.name in OF_HOST]
            found[rank] = [*found[rank], *of_host]
    return merged([[*together, *(one for one in mine if one not in together)] for mine in found], hosts)


def _folders(options: DoctorOptions) -> dict[str, Path]:
    return {"output_dir": Path(options.output_dir), "cache_dir": cache_directory(options.cache_dir)}
