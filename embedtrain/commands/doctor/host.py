"""Findings, and checks of a host: ports, processor, memory, GPUs, and the directories that training writes to."""

import contextlib
import os
import platform
import re
import resource
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

import psutil

from embedtrain.distributed.device import CGROUP, cgroup_memory
from embedtrain.distributed.watchdog.launcher import find_launcher
from embedtrain.distributed.watchdog.peers import format_ranks
from embedtrain.distributed.world import World
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import format_bytes, format_count
from embedtrain.utils.limits import num_usable_cores

TOPICS = ("versions", "devices", "ranks", "environment", "disks", "services")


class Level(str, Enum):
    """Severity: fine, good to know, slower or riskier than necessary, or prevents training."""

    ok = "ok"
    note = "note"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    topic: str  # one of TOPICS
    name: str  # what was checked, in a word or two
    text: str  # what was measured, or why it was not
    level: Level = Level.ok
    do: str = ""  # one sentence on what to do
    where: str = ""  # the ranks for which it holds; empty for all

    def as_json(self) -> dict[str, str]:
        """For `--json`."""
        return {**asdict(self), "level": self.level.value}


def merge_findings(findings_of_ranks: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Every finding once, with its ranks if it does not hold for all; findings and hosts are by rank."""
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(findings_of_ranks):
        for finding in dict.fromkeys(findings):
            ranks_of.setdefault(finding, []).append(rank)
    return in_order(
        finding if len(ranks) == len(findings_of_ranks) else replace(finding, where=format_ranks(ranks, hosts))
        for finding, ranks in ranks_of.items()
    )


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by topic; findings of one topic keep their order."""
    return sorted(findings, key=lambda finding: TOPICS.index(finding.topic))


def worst(findings: Iterable[Finding]) -> Level:
    """The most severe level."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.ok)


_ALL_INTERFACES = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_RENDEZVOUS = re.compile(r"--(rdzv[-_](backend|endpoint)|master[-_]port|standalone)(?:=(.*))?")
_LOOPBACK = re.compile(r"127\.|::1$|::ffff:127\.")


@dataclass(frozen=True, slots=True)
class Port:
    """A port on which a process listens."""

    process: str
    address: str
    number: int
    executes_code: bool = False  # torchrun unpickles what is written there


def listening_ports(process: psutil.Process, name: str, *, executes_code: bool = False) -> list[Port]:
    """The TCP ports on which a process of this user listens; none if the system does not show them."""
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return []
    return [
        Port(name, connection.laddr.ip, connection.laddr.port, executes_code)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


def unpickles_rendezvous(command: Sequence[str]) -> bool:
    """Whether a torchrun with this command line unpickles the state of its rendezvous: only `static` does not.

    Without a backend and a port, torchrun on one node uses c10d (torch 2.13); accelerate always has a port.
    """
    options = {"backend": os.environ.get("PET_RDZV_BACKEND", ""), "port": os.environ.get("PET_MASTER_PORT", "")}
    if any("accelerate" in word for word in command[:4]):
        options["port"] = "29500"
    for word, following in zip(command, [*command[1:], ""], strict=True):
        match = _RENDEZVOUS.fullmatch(word)
        if match is None:
            continue
        if match[1] == "standalone":
            return True
        name = "backend" if match[2] == "backend" else "port"
        options[name] = match[3] if match[3] is not None else following
    return options["backend"] not in ("", "static") or not options["port"]


def _launcher_ports(pid: int) -> list[Port]:
    try:
        launcher = psutil.Process(pid)
        return listening_ports(launcher, "torchrun", executes_code=unpickles_rendezvous(launcher.cmdline()))
    except psutil.Error:  # it has just ended
        return []


def check_ports(world: World, hosts: Sequence[str]) -> list[Finding]:
    """Whether this run listens beyond loopback on one host, or on all interfaces on several. A collective."""
    ports = listening_ports(psutil.Process(), "ranks")
    launcher = find_launcher() if world.local_rank == 0 else None
    if launcher is not None:
        ports += _launcher_ports(launcher.pid)
    is_one_host = len(set(hosts)) == 1
    beyond: dict[tuple[str, str, str, bool], set[int]] = {}
    for host, ports_of_rank in zip(hosts, world.gather(ports, Port), strict=True):
        for port in ports_of_rank:
            is_everywhere = port.address in _ALL_INTERFACES
            if is_everywhere or (is_one_host and not _LOOPBACK.match(port.address)):
                where = "all interfaces" if is_everywhere else port.address
                beyond.setdefault((host, port.process, where, port.executes_code), set()).add(port.number)
    if not beyond:
        text = "no process listens beyond loopback" if is_one_host else "no process listens on all interfaces"
        return [Finding("ranks", "ports", text)]
    findings = []
    for (host, process, where, executes_code), numbers in beyond.items():
        text = f"{process} on {host} listens on {where}: {', '.join(map(str, sorted(numbers)))}"
        level, do = Level.note, "Close these ports to hosts that you do not trust: see docs/trust.md."
        if executes_code:
            text += "; whoever reaches these ports can execute code as this user"
            level, do = Level.warning, "Start torchrun with --rdzv-backend=static --master-port=29500. " + do
        findings.append(Finding("ranks", "ports", text, level, do))
    return findings


# Names of findings that all ranks of a host share.
PER_HOST = ("cpu", "threads", "memory", "/dev/shm", "files")  # noqa: S108
_GIB = 1 << 30
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - checked, not written
_BLOCK_SIZE = 4 << 20  # bytes written at a time
_MAX_SIZE, _MAX_SECONDS = 256 << 20, 5.0  # of the file for measuring the speed
_MIN_FREE = 5 * 10**9
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_CONTAINER_FILE_SYSTEMS = ("overlay", "aufs")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p",
                         "virtiofs", "wekafs")  # fmt: skip


def check_devices(local_rank: int, local_size: int) -> list[Finding]:
    """Checks of the host, by its first rank, and of this rank's GPU; a single rank checks all GPUs."""
    host = [_check_cpu(), _check_threads(local_size), _check_memory(), _check_shared_memory(), _check_open_files()]
    return [*(host if local_rank == 0 else []), *_check_gpus(local_rank, local_size)]


def _check_cpu() -> Finding:
    import torch

    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    capabilities = {} if get_capabilities is None else get_capabilities()
    bf16 = [name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if capabilities.get(name)]
    text = f"{_processor()}, {num_usable_cores()} of {os.cpu_count()} cores usable"
    quota = _quota()
    if quota is not None and quota < num_usable_cores():
        do = "More threads wait for each other: set OMP_NUM_THREADS, or give the container more."
        return Finding("devices", "cpu", f"{text}, but the cgroup allows {quota:.3g} at a time", Level.warning, do)
    if not capabilities:
        return Finding("devices", "cpu", f"{text}; bf16 not checked, because this torch does not report it")
    return Finding("devices", "cpu", f"{text}; " + (f"bf16 with {', '.join(bf16)}" if bf16 else "no bf16 instructions"))


def _check_threads(local_size: int) -> Finding:
    import torch

    threads = torch.get_num_threads()
    text = f"{threads} per rank, {format_count(local_size, 'rank')} on this host"
    cores = num_usable_cores()
    if threads * local_size > cores:
        do = f"Set OMP_NUM_THREADS={max(1, cores // local_size)}: otherwise ranks wait for each other's threads."
        return Finding("devices", "threads", f"{text}: more than {cores} cores", Level.warning, do)
    return Finding("devices", "threads", text)


def _check_memory() -> Finding:
    memory = psutil.virtual_memory()
    text = _free(memory.available, memory.total)
    limit, used = cgroup_memory()
    if limit is None or limit >= memory.total:
        return Finding("devices", "memory", text)
    return Finding("devices", "memory", f"{text}; the cgroup allows {_gib(limit)}, {_gib(used or 0)} in use")


def _check_shared_memory() -> Finding:
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        return Finding("devices", _SHARED_MEMORY, f"not checked, because: {error.strerror}", Level.note)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = _free(free, size)
    if size < _GIB:
        do = "Start the container with --ipc=host or --shm-size=8g: NCCL communicates through it within a host."
        return Finding("devices", _SHARED_MEMORY, text, Level.warning, do)
    return Finding("devices", _SHARED_MEMORY, text)


def _check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} may be open" if soft != resource.RLIM_INFINITY else "any number may be open"
    if 0 <= soft < 4096:
        limit = min(65536, hard) if hard > 0 else 65536
        do = f"Raise it: ulimit -n {limit} (each of many small sources is an open file)."
        return Finding("devices", "files", text, Level.note, do)
    return Finding("devices", "files", text)


def _check_gpus(local_rank: int, local_size: int) -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding("devices", "gpu", "none that torch can use: ranks use the CPU")]
    findings, count = [], torch.cuda.device_count()
    if local_rank >= count > 1:
        do = f"Start with --nproc-per-node {count}."
        return [Finding("devices", "gpus", f"{count}, but {local_size} ranks on this host", Level.problem, do)]
    # Querying a GPU takes some of its memory. A launcher may show each rank only its own.
    for number in range(count) if local_size == 1 else [local_rank if count > 1 else 0]:
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        text = f"{properties.name}, {_free(free, total)}, compute {properties.major}.{properties.minor}"
        level, do = Level.ok, ""
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            text, level, do = f"{text}, no bf16", Level.warning, "Train with parallel.precision=fp32."
        elif free < 0.9 * total:
            level, do = Level.warning, "Another process uses its memory: nvidia-smi shows which."
        name = f"gpu {number if local_size == 1 else local_rank}"
        findings.append(Finding("devices", name, text, level, do))
    return findings


def _free(free: int, total: int) -> str:
    return f"{_gib(free)} free of {_gib(total)}"


def _gib(num_bytes: int) -> str:
    return format_bytes(num_bytes, binary=True)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _quota() -> float | None:
    """The number of cores whose time the cgroup allows; None without a limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        quota_us, period_us = _number(CGROUP / "cpu/cpu.cfs_quota_us"), _number(CGROUP / "cpu/cpu.cfs_period_us")
        return quota_us / period_us if quota_us is not None and quota_us > 0 and period_us else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def check_disk(name: str, directory: Path, *, measure: bool) -> list[Finding]:
    """Whether the directory of option `name` can be written, its free space, file system and speed.

    If it does not exist, its nearest parent is checked. `measure`: write and read a file to measure the speed.
    """
    directory = expand_user(directory).absolute()
    existing = _nearest_existing(directory)
    shown = f"{directory}" if existing == directory else f"{directory} (will be created in {existing})"
    if not existing.is_dir():
        return [Finding("disks", name, f"{shown}: it is a file", Level.problem, f"Choose another {name}.")]
    file_system = _file_system(existing)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".embedtrain-doctor-") as file:
            file.write(b"1" * _BLOCK_SIZE)
            file.flush()
            os.fsync(file.fileno())
            speed = _speed(file.fileno()) if measure else "speed not measured, because quick=true"
    except OSError as error:
        do = f"Set {name} to a directory that this user can write to, with free space."
        text = f"{shown} ({file_system}) cannot be written: {error.strerror}"
        return [Finding("disks", name, text, Level.problem, do)]
    status = os.statvfs(existing)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{shown}, {file_system}, {format_bytes(free)} free of {format_bytes(size)}; {speed}"
    if file_system in _MEMORY_FILE_SYSTEMS:
        do = f"It uses memory and is lost when the machine restarts: choose a disk for {name}."
        return [Finding("disks", name, text, Level.warning, do)]
    if free < _MIN_FREE:
        do = "Free some space: a checkpoint takes about 12 bytes per parameter; checkpoint.max_disk_gb limits them."
        return [Finding("disks", name, text, Level.warning, do)]
    if file_system in _CONTAINER_FILE_SYSTEMS:
        do = f"It is deleted with the container: mount a volume for {name}."
        return [Finding("disks", name, text, Level.note, do)]
    return [Finding("disks", name, text)]


def check_shared_disk(name: str, directory: Path, world: World, hosts: list[str]) -> list[Finding]:
    """Whether all hosts see what rank 0 writes into the directory of option `name`. A collective."""
    if len(set(hosts)) == 1:
        return []
    existing = _nearest_existing(expand_user(directory).absolute())
    path: Path | None = None
    with contextlib.suppress(OSError):
        if world.is_main:
            descriptor, name_of_file = tempfile.mkstemp(dir=existing, prefix=".embedtrain-doctor-")
            os.close(descriptor)
            path = Path(name_of_file)
    visible_path = world.broadcast(None if path is None else str(path))
    shared_path = None if visible_path is None else Path(visible_path)
    try:
        is_visible = world.gather(shared_path is not None and _appears(shared_path))
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    if shared_path is None:
        return [Finding("disks", f"{name} on all hosts", "not checked, because rank 0 cannot write there")]
    without = sorted({hosts[rank] for rank, visible in enumerate(is_visible) if not visible})
    if without:
        do = f"Set {name} to a directory that all hosts mount at the same path."
        text = f"{', '.join(without)} cannot see what {hosts[0]} writes into {existing}"
        return [Finding("disks", f"{name} on all hosts", text, Level.problem, do)]
    return [Finding("disks", f"{name} on all hosts", f"seen by {len(set(hosts))} hosts")]


def _nearest_existing(directory: Path) -> Path:
    """The directory, or its nearest parent that exists and that this user can see."""
    for path in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            if path.exists():
                return path
    return Path("/")


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + 10.0  # a shared file system may take a moment
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _speed(file: int) -> str:
    """Write and read speed without the page cache, as far as the system drops the file from it."""
    block = os.urandom(_BLOCK_SIZE)
    started, written = time.perf_counter(), 0
    while written < _MAX_SIZE and time.perf_counter() - started < _MAX_SECONDS:
        written += os.write(file, block)
    os.fsync(file)
    write_seconds = time.perf_counter() - started
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    started, read = time.perf_counter(), 0
    while content := os.read(file, _BLOCK_SIZE):
        read += len(content)
    read_seconds = time.perf_counter() - started
    write_speed, read_speed = written / write_seconds / 1e6, read / read_seconds / 1e6
    return f"writes {write_speed:,.0f} MB/s, reads {read_speed:,.0f} MB/s ({written >> 20} MiB)"


def _file_system(directory: Path) -> str:
    mount_point, file_system = "", "unknown file system"
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return file_system
    for line in lines:
        _, path, name, *_ = line.split(" ")
        path = path.encode().decode("unicode_escape")
        contains = directory == Path(path) or Path(path) in directory.parents
        if contains and len(path) >= len(mount_point):
            mount_point, file_system = path, name
    over_network = file_system in _NETWORK_FILE_SYSTEMS or file_system.startswith("fuse.")
    return f"{file_system} over the network" if over_network else file_system
