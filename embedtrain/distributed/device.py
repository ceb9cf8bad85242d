"""The device of this rank: its memory, errors when it is exhausted, threads that use it, and deterministic kernels."""

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils import deterministic

from embedtrain.distributed.watchdog.watchdog import current_activity
from embedtrain.errors import OutOfMemory
from embedtrain.utils.formatting import format_bytes

# What torch raises: torch.OutOfMemoryError, the CUDA runtime outside of torch's allocator, and the allocator of a CPU.
_EXHAUSTED = re.compile(r"out of memory|DefaultCPUAllocator: (can't|not enough)")
_REQUESTED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.]+ (?:[KMGT]iB|bytes))")

CGROUP = Path("/sys/fs/cgroup")  # the root of those that this process sees: of its container, or of the host
_OWN_CGROUPS = Path("/proc/self/cgroup")  # which of them this process is in
# By the controller in _OWN_CGROUPS, of version 2 and 1: the folder of the root, the limit, and what is in use.
_MEMORY_FILES = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}

# What was planned and which options to lower, by the beginning of the activity.
_advice: dict[str, str] = dict.fromkeys(
    ("opening the model", "opening the reranker", "opening the graph", "reading the model's weights"),
    "the model's files need more than that: use more ranks, or a smaller model",
)


def total_memory(device: torch.device, local_size: int = 1) -> int:
    """Total bytes for one rank: of its GPU, or its part of the memory of the node."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_size


def node_memory() -> int:
    """Bytes of host memory for all ranks of this node: no more than the cgroup of the job or container allows."""
    total = int(psutil.virtual_memory().total)
    limit, _ = cgroup_memory()
    return total if limit is None else min(total, limit)


def cgroup_memory(cgroup: Path = CGROUP, own: Path = _OWN_CGROUPS) -> tuple[int | None, int | None]:
    """Bytes that the cgroups of this process (of version 2, or 1) allow, and those in use; None without a limit.

    The lowest limit of all levels counts. A container has its own at the root. A job of SLURM sees the cgroups of the
    host, and has its limit several levels below.
    """
    found: list[tuple[int, int]] = []
    for controller, path in _own_cgroups(own).items():
        root, limit, used = _MEMORY_FILES[controller]
        for folder in (path, *path.parents):
            level = cgroup / root / folder
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                found.append((int((level / limit).read_text(encoding="utf-8")), int((level / used).read_text("utf-8"))))
    return min(found, default=(None, None))


def _own_cgroups(file: Path) -> dict[str, Path]:
    """The cgroup of this process by controller, relative to the root; the root itself where that is not known."""
    own = dict.fromkeys(_MEMORY_FILES, Path())
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in own.keys() & set(controllers.split(",")):
                # Of a cgroup outside of this process's namespace the path begins with "/..".
                own[controller] = Path() if ".." in path.split("/") else Path(path.lstrip("/"))
    return own


def free_memory(device: torch.device, local_size: int = 1) -> int:
    """Free bytes for one rank: of its GPU, or its part of the free memory of the node.

    torch keeps freed memory of a GPU reserved for later tensors: in use for the driver, free for this process.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(psutil.virtual_memory().available) // local_size


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the system, where glibc allocates it.

    It keeps what is freed for later allocations. If each of these is a little larger than the last, none fits, and the
    process grows.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Names in torch: AMX and AVX512 on x86, and those of ARM. Other CPUs convert bf16 to fp32 and back for every product.
_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies matrices in bf16; of CPUs torch reports that from 2.12 on, before it is false."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in _BF16_INSTRUCTIONS)


def thread_initializer() -> Callable[[], None]:
    """A function that new threads call first if they use the GPU of the calling thread; it does nothing on a CPU.

    A thread starts with GPU 0. What it does there without naming a device, such as pinning memory, creates a context of
    several hundred MiB on GPU 0 for every rank of the node.
    """
    if not torch.cuda.is_initialized():
        return _nothing
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _nothing() -> None:
    pass


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """If enabled, use only algorithms on a GPU that give the same bits in every run. Enter it before joining the ranks.

    torch then selects deterministic kernels for the backward pass of attention and for sums by index, raises where
    there is none, and turns off NCCL's reductions in the switch (NVLS), which it decides when the process group is
    created. cuBLAS reads its variable when it is first used.
    """
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    previous = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = deterministic  # a module with properties, unknown to mypy
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # nothing reads such memory, and filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous[0], warn_only=previous[1])
        settings.fill_uninitialized_memory = fills


def advise_when_exhausted(activity: str, advice: str) -> None:
    """Set the end of the message when memory is exhausted during activities whose name begins with `activity`."""
    _advice[activity] = advice


@contextlib.contextmanager
def explain_out_of_memory(device: torch.device, local_size: int = 1) -> Iterator[None]:
    """Convert the error of an allocation that failed into OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not _EXHAUSTED.search(str(error)):
            raise
        # The allocator of GPU memory has a type of its own; other memory that CUDA gives is of the host, page-locked.
        if device.type == "cuda" and "CUDA error: out of memory" in str(error):
            raise OutOfMemory(_describe_host()) from error
        raise OutOfMemory(_describe(device, local_size, str(error))) from error


def _describe_host() -> str:
    free = _gib(psutil.virtual_memory().available)
    return (
        f"out of memory while {current_activity().name}: CUDA could not lock pages of the host's memory, of which "
        f"{free} are free; raise the memory limit of the job or container and `ulimit -l`, or lower data.workers"
    )


def _describe(device: torch.device, local_size: int, error: str) -> str:
    activity = current_activity()
    match = _REQUESTED.search(error)
    request = "an allocation" if match is None else _allocation(match[1])
    on_gpu = device.type == "cuda"
    used = torch.cuda.memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
    advice = _advice.get(max(filter(activity.name.startswith, _advice), key=len, default=""))
    return (
        f"out of memory while {activity}: {request} failed, this process uses {_gib(used)} of "
        f"{_gib(total_memory(device, local_size))}, {_gib(free_memory(device, local_size))} are free; "
        f"{advice or 'lower chunk_tokens, or use more ranks'}"
    )


def _allocation(size: str) -> str:
    number, _, unit = size.partition(" ")
    return f"an allocation of {_gib(int(number)) if unit == 'bytes' else size}"


def _gib(num_bytes: float) -> str:
    return format_bytes(num_bytes, binary=True)
