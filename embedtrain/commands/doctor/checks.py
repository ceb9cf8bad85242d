"""Checks of the software around a run and of the process group, and how the findings of all ranks are merged."""

import importlib.metadata
import json
import netrc
import os
import platform
import shutil
import socket
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

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
from embedtrain.distributed.world import (
    NCCL_ERROR_EFFECTS,
    NCCL_ERROR_HANDLING,
    World,
    device_group,
    nccl_error_handling,
)
from embedtrain.utils.formatting import format_count

if TYPE_CHECKING:
    from embedtrain.commands.doctor import DoctorOptions


_SIZES = {"cuda": (1 << 20, 16 << 20, 256 << 20), "cpu": (1 << 16, 1 << 20, 16 << 20)}  # bytes per rank
_MAX_GATHERED = 4 << 30  # bytes of all ranks
_MAX_ROUNDS, _MAX_SECONDS = 5, 3.0
# Why a release that exists is not supported.
_WHY_BOUNDED = {
    "transformers": ": from 5.24 on, its set_adapter, which chooses one of the adapters of an exported model, asks for "
    "PEFT 0.22, which is not published"
}
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
        of_hosts = [[rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)]
        group = device_group(world.device, of_hosts, "the ranks of a host")
        if max(map(len, of_hosts)) > 1:
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


_SECRET = ("TOKEN", "KEY", "PASSWORD", "SECRET")
_ACCELERATE_PREFIXES = ("ACCELERATE_", "FSDP_")
_LAYER_CLASS_VARIABLE = "FSDP_TRANSFORMER_CLS_TO_WRAP"
# Variables that other libraries read, which are reported as they are.
_REPORTED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "WANDB_",
                      "EMBEDTRAIN_")  # fmt: skip
_REPORTED = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "LD_PRELOAD", "PYTHONPATH",
               "TOKENIZERS_PARALLELISM")  # fmt: skip
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_ON = ("1", "true", "yes", "on")
_TIMEOUT = 8.0  # seconds of a request to the Hub
# Variable, harmful values, their effect, and what to do.
_HARMFUL: list[tuple[str, tuple[str, ...], str, str]] = [
    ("NCCL_P2P_DISABLE", _ON, "GPUs of a host communicate through its memory, several times slower", "Unset it."),
    ("NCCL_SHM_DISABLE", _ON, "ranks of a host communicate over the network",
     "Unset it, and give the container /dev/shm."),
    ("NCCL_IB_DISABLE", _ON, "hosts communicate over TCP instead of InfiniBand or RoCE",
     "Unset it if there is such a network."),
    ("NCCL_DEBUG", ("TRACE",), "NCCL logs every operation", "Set NCCL_DEBUG=WARN, or INFO temporarily."),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, "the host waits for every collective and cannot run ahead", "Unset it."),
    ("CUDA_LAUNCH_BLOCKING", _ON, "the host waits for every kernel, which is for debugging", "Unset it for training."),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is checked by another one", "Unset it for training."),
    ("CUDA_VISIBLE_DEVICES", ("", "-1"), "it hides all GPUs", "Unset it, or name the GPUs: CUDA_VISIBLE_DEVICES=0,1."),
]  # fmt: skip


def check_environment(environment: Mapping[str, str], num_hosts: int) -> list[Finding]:
    """Checks of environment variables; `environment` is that of the process at its start."""
    harmful = [finding for finding in (_check_harmful(environment, *rule) for rule in _HARMFUL) if finding is not None]
    harmful += _check_error_handling(environment)
    reported = {finding.name for finding in harmful}
    findings = [*_check_accelerate(environment), *harmful]
    for variable in sorted(environment):
        if variable in reported:
            continue
        if variable.endswith("SOCKET_IFNAME"):
            findings.append(_check_interface(variable, environment[variable], num_hosts))
        elif variable.lower() in _PROXIES:
            findings.append(Finding("environment", variable, _without_password(environment[variable]), Level.note,
                                    "Downloads use it; ranks never do."))  # fmt: skip
        elif variable.startswith(_REPORTED_PREFIXES) or variable in _REPORTED:
            findings.append(Finding("environment", variable, _hide_secret(variable, environment[variable])))
    return findings or [Finding("environment", "variables", "none that interferes")]


def _check_accelerate(environment: Mapping[str, str]) -> Iterable[Finding]:
    names = sorted(name for name in environment if name.startswith(_ACCELERATE_PREFIXES))
    names = [name for name in names if name != _LAYER_CLASS_VARIABLE]
    if names:
        yield Finding(
            "environment",
            "accelerate",
            f"{', '.join(names)}: embedtrain removes them (with them, transformers may load models without weights)",
            Level.warning,
            f"Start with torchrun; parallel.accelerate_config=FILE reads the options: unset {' '.join(names)}",
        )
    layer_class = environment.get(_LAYER_CLASS_VARIABLE)
    if layer_class is not None:
        do = f"parallel.block_class={layer_class} sets the same in the recipe."
        yield Finding("environment", _LAYER_CLASS_VARIABLE, f"{layer_class} is the sharded class", Level.note, do)


def _check_error_handling(environment: Mapping[str, str]) -> Iterable[Finding]:
    """A value of the variable that training keeps, although its own is better."""
    value = environment.get(NCCL_ERROR_HANDLING, "").strip()
    if value in NCCL_ERROR_EFFECTS and value != nccl_error_handling(environment):
        do = "Unset it: training sets the value with which a lost rank is named."
        yield Finding("environment", NCCL_ERROR_HANDLING, f"{value}: {NCCL_ERROR_EFFECTS[value]}", Level.warning, do)


def _check_harmful(
    environment: Mapping[str, str], name: str, values: tuple[str, ...], text: str, do: str
) -> Finding | None:
    if environment.get(name, "unset").strip().lower() not in [value.lower() for value in values]:
        return None
    return Finding("environment", name, f"{environment[name] or 'empty'}: {text}", Level.warning, do)


def _check_interface(variable: str, value: str, num_hosts: int) -> Finding:
    """Network interfaces of ranks: NCCL takes prefixes, `=name` and `^name`."""
    existing = sorted(psutil.net_if_addrs())
    prefixes = value.lstrip("^=").split(",")
    selected = [name for name in existing if any(name.startswith(prefix) for prefix in prefixes)]
    if not selected and not value.startswith("^"):  # an excluded interface need not exist
        do = f"Name one that exists ({', '.join(existing)}), or unset it."
        return Finding("environment", variable, f"{value}: this host has no such interface", Level.problem, do)
    if num_hosts > 1 and not value.startswith("^") and all(name == "lo" for name in selected):
        do = f"Name one that reaches the other hosts: {', '.join(name for name in existing if name != 'lo')}."
        text = f"{value} does not leave this host, but the ranks are on several hosts"
        return Finding("environment", variable, text, Level.problem, do)
    return Finding("environment", variable, value)


def _hide_secret(variable: str, value: str) -> str:
    is_secret = any(word in variable for word in _SECRET) and variable not in _REPORTED
    return "set" if is_secret and value else _without_password(value) or "empty"


def _without_password(address: str) -> str:
    """The address without user and password, which may contain any character, so it is not parsed."""
    before, at, host = address.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return f"{scheme + separator if separator else ''}...@{host}" if at else address


def check_versions() -> list[Finding]:
    """Checks of Python, every required package against its supported range, and CUDA in torch."""
    import torch

    findings = [Finding("versions", "python", f"{platform.python_version()} on {platform.platform(terse=True)}")]
    try:
        metadata = importlib.metadata.metadata("embedtrain")
        requirements = importlib.metadata.requires("embedtrain") or []
    except importlib.metadata.PackageNotFoundError:
        why = "not compared with their ranges, because embedtrain is not installed (it runs from a directory)"
        findings.append(Finding("versions", "packages", why, Level.note, "Install it: pip install ."))
    else:
        supported = SpecifierSet(metadata["Requires-Python"] or "")
        if not supported.contains(platform.python_version()):
            text, do = f"{platform.python_version()}, required is {supported}", f"Install Python {supported}."
            findings[0] = Finding("versions", "python", text, Level.problem, do)
        findings += _check_packages(metadata["Version"], requirements)
    return [*findings, _check_cuda(torch.version.cuda)]


def _check_packages(own_version: str, requirements: list[str]) -> list[Finding]:
    supported, problems = [f"embedtrain {own_version}"], []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, specifier = requirement.name, requirement.specifier
        do = f"pip install '{name}{specifier}'" + _WHY_BOUNDED.get(name, "")
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(Finding("versions", name, f"is not installed, required is {specifier}", Level.problem, do))
            continue
        if specifier.contains(version, prereleases=True):
            supported.append(f"{name} {version}")
        else:
            text = f"{version} is installed, required is {specifier}"
            problems.append(Finding("versions", name, text, Level.problem, do))
    return [Finding("versions", "packages", ", ".join(supported)), *problems]


def _check_cuda(built_with: str | None) -> Finding:
    import torch

    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    if built_with is None:
        text = "torch is built for CPUs"
        if has_gpu:
            do = "Install torch for CUDA: https://pytorch.org/get-started."
            return Finding("versions", "cuda", f"{text}, but this machine has an NVIDIA GPU", Level.problem, do)
        return Finding("versions", "cuda", text)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if sys.platform == "linux" else "none"
    text = f"torch is built with CUDA {built_with}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    if has_gpu and not torch.cuda.is_available():
        do = f"Update the driver to one for CUDA {built_with}, or install a torch for the driver's CUDA (nvidia-smi)."
        return Finding("versions", "cuda", f"{text}; torch cannot use this machine's GPU", Level.problem, do)
    return Finding("versions", "cuda", text)


def check_services(environment: Mapping[str, str], *, ask_hub: bool) -> list[Finding]:
    """Checks of the Hugging Face Hub (with requests if `ask_hub`), wandb and SLURM."""
    return [*_check_hub(environment, send_requests=ask_hub), _check_wandb(environment), _check_slurm(environment)]


def _check_hub(environment: Mapping[str, str], *, send_requests: bool) -> list[Finding]:
    from huggingface_hub import constants, get_token

    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
               if environment.get(name, "").lower() in _ON]  # fmt: skip
    if offline:
        do = "Models and data sets must be in directories or in HF_HOME; unset it to download them."
        return [Finding("services", "hub", f"not checked, because {offline[0]} is set", Level.note, do)]
    if not send_requests:
        return [Finding("services", "hub", "not checked, because hub=false or quick=true")]
    endpoint, token = constants.ENDPOINT, get_token()
    response = _with_timeout(lambda: _get(f"{endpoint}/api/models?limit=1", None))
    if isinstance(response, str):
        do = "Download models elsewhere, copy HF_HOME and set HF_HUB_OFFLINE=1; or set HTTPS_PROXY."
        return [Finding("services", "hub", f"{endpoint} cannot be reached ({response})", Level.warning, do)]
    findings = [Finding("services", "hub", f"{endpoint} answers")]
    if token is None:
        do = "For gated models (Llama, Gemma): hf auth login, or set HF_TOKEN."
        return [*findings, Finding("services", "hub token", "none", Level.note, do)]
    user = _with_timeout(lambda: _get(f"{endpoint}/api/whoami-v2", token))
    if isinstance(user, str) and user not in ("HTTP 401", "HTTP 403"):
        return [*findings, Finding("services", "hub token", f"set, but not checked ({user})", Level.note,
                                   "Try again later: the Hub limits the number of such requests.")]  # fmt: skip
    if isinstance(user, str):
        do = "Create a new one (hf auth login), or unset HF_TOKEN: an invalid token blocks public models as well."
        return [*findings, Finding("services", "hub token", f"is rejected ({user})", Level.problem, do)]
    try:
        name = str(json.loads(user)["name"])
    except (ValueError, KeyError, TypeError):
        text, do = f"{endpoint} answers, but not as the Hub", "Check for a proxy or a login page of the network."
        return [*findings, Finding("services", "hub token", text, Level.warning, do)]
    return [*findings, Finding("services", "hub token", f"belongs to {name}")]


def _check_wandb(environment: Mapping[str, str]) -> Finding:
    mode = environment.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        do = "Unset it to send metrics; wandb sync sends offline runs."
        return Finding("services", "wandb", f"WANDB_MODE={mode}: nothing is sent", Level.note, do)
    if environment.get("WANDB_API_KEY"):
        return Finding("services", "wandb", "WANDB_API_KEY is set; not tried, because that would start a session")
    try:
        key = netrc.netrc(os.path.expanduser("~/.netrc")).authenticators("api.wandb.ai")
    except (OSError, netrc.NetrcParseError):
        key = None
    if key is not None:
        return Finding("services", "wandb", "a key is in ~/.netrc; not tried, because that would start a session")
    do = "For tracking.wandb=true: wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline."
    return Finding("services", "wandb", "no key", Level.note, do)


def _check_slurm(environment: Mapping[str, str]) -> Finding:
    job = environment.get("SLURM_JOB_ID")
    if job is not None:
        nodes, tasks = environment.get("SLURM_NNODES", "?"), environment.get("SLURM_NTASKS", "?")
        return Finding("services", "slurm", f"in job {job}: {nodes} nodes, {tasks} tasks")
    return Finding("services", "slurm", "sbatch is available" if shutil.which("sbatch") else "none on this host")


class _Response(bytes):
    """The body of a response."""


def _get(address: str, token: str | None) -> "_Response | str":
    """The response, or why there is none."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT / 2) as response:  # noqa: S310
            return _Response(response.read(1 << 16))
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def _with_timeout(request: Callable[[], _Response | str]) -> _Response | str:
    """The response within `_TIMEOUT`; resolving a name has no timeout of its own."""
    responses: SimpleQueue[_Response | str] = SimpleQueue()
    threading.Thread(target=lambda: responses.put(request()), daemon=True).start()
    try:
        return responses.get(timeout=_TIMEOUT)
    except Empty:
        return f"no response within {_TIMEOUT:.0f} s"
