"""Processors, GPUs and memory: how many, how much, and what limits them here."""

import os
import platform
import resource
from pathlib import Path

import psutil

from embedtrain.doctor.finding import Finding, Level

_TOPIC = "devices"
OF_HOST = ("cpu", "threads", "memory", "/dev/shm", "files")  # noqa: S108 - names of what a host has once
_GIB = 1 << 30
_SHARED = "/dev/shm"  # noqa: S108 - looked at, not written
_CGROUP = Path("/sys/fs/cgroup")


def check_devices(local_rank: int, local_size: int) -> list[Finding]:
    """Of this rank's host, which its first rank looks at, and of this rank's GPU; a rank alone looks at all of them.

    Args:
        local_rank: among the ranks of the host.
        local_size: ranks on it.
    """
    of_host = [_of_cpu(), _of_threads(local_size), _of_memory(), _of_shared_memory(), _of_files()]
    return [*(of_host if local_rank == 0 else []), *_of_gpus(local_rank, local_size)]


def _of_cpu() -> Finding:
    import torch

    asked = getattr(torch.cpu, "get_capabilities", None)
    capable = {} if asked is None else asked()
    bf16 = [name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if capable.get(name)]
    text = f"{_processor()}, {_cores()} of {os.cpu_count()} cores usable"
    quota = _quota()
    if quota is not None and quota < _cores():
        do = "Threads beyond that stand still in turn: set OMP_NUM_THREADS, or give the container more."
        return Finding(_TOPIC, "cpu", f"{text}, but the cgroup allows {quota:.3g} at a time", Level.warning, do)
    if not capable:
        return Finding(_TOPIC, "cpu", f"{text}; bf16 not looked at, because this torch does not tell")
    return Finding(_TOPIC, "cpu", f"{text}; bf16 by {', '.join(bf16)}" if bf16 else f"{text}; no instructions for bf16")


def _of_threads(local_size: int) -> Finding:
    import torch

    threads = torch.get_num_threads()
    text = f"{threads} a rank, {local_size} rank{'s' * (local_size > 1)} on this host"
    if threads * local_size > _cores():
        do = f"Set OMP_NUM_THREADS={max(1, _cores() // local_size)}: ranks wait for each other's threads otherwise."
        return Finding(_TOPIC, "threads", f"{text}: more than {_cores()} cores", Level.warning, do)
    return Finding(_TOPIC, "threads", text)


def _of_memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB"
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None:
        limit = _number(_CGROUP / "memory/memory.limit_in_bytes")
        used = _number(_CGROUP / "memory/memory.usage_in_bytes")
    if limit is None or limit >= memory.total:
        return Finding(_TOPIC, "memory", text)
    return Finding(
        _TOPIC, "memory", f"{text}; the cgroup allows {limit / _GIB:.1f} GiB, {(used or 0) / _GIB:.1f} in use"
    )


def _of_shared_memory() -> Finding:
    try:
        place = os.statvfs(_SHARED)
    except OSError as error:
        return Finding(_TOPIC, _SHARED, f"not looked at, because: {error.strerror}", Level.note)
    size, free = place.f_blocks * place.f_frsize, place.f_bavail * place.f_frsize
    text = f"{free / _GIB:.2f} GiB free of {size / _GIB:.2f} GiB"
    if size < _GIB:
        do = "Start the container with --ipc=host or --shm-size=8g: NCCL talks through it within a host."
        return Finding(_TOPIC, _SHARED, text, Level.warning, do)
    return Finding(_TOPIC, _SHARED, text)


def _of_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} may be open" if soft != resource.RLIM_INFINITY else "any number may be open"
    if 0 <= soft < 4096:
        most = min(65536, hard) if hard > 0 else 65536
        do = f"Raise it: ulimit -n {most} (many small sources are as many open files)."
        return Finding(_TOPIC, "files", text, Level.note, do)
    return Finding(_TOPIC, "files", text)


def _of_gpus(local_rank: int, local_size: int) -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding(_TOPIC, "gpu", "none that torch can use: ranks compute on the CPU")]
    findings, count = [], torch.cuda.device_count()
    if local_rank >= count > 1:
        do = f"Start with --nproc-per-node {count}."
        return [Finding(_TOPIC, "gpus", f"{count}, but {local_size} ranks on this host", Level.problem, do)]
    # Asking a GPU takes some of its memory. A launcher may show each rank its own alone.
    for number in range(count) if local_size == 1 else [local_rank if count > 1 else 0]:
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        text = (
            f"{about.name}, {free / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB, compute {about.major}.{about.minor}"
        )
        level, do = Level.ok, ""
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            text, level, do = f"{text}, no bf16", Level.warning, "Train with parallel.precision=fp32."
        elif free < 0.9 * total:
            level, do = Level.warning, "Another process uses its memory: nvidia-smi tells which."
        name = f"gpu {number if local_size == 1 else local_rank}"
        findings.append(Finding(_TOPIC, name, text, level, do))
    return findings


def _cores() -> int:
    """That this process may use."""
    return len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _quota() -> float | None:
    """Cores' worth of time that the cgroup allows; None where it sets no limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        old, every = _number(_CGROUP / "cpu/cpu.cfs_quota_us"), _number(_CGROUP / "cpu/cpu.cfs_period_us")
        return old / every if old is not None and old > 0 and every else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
