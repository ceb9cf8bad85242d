"""Variables of the environment that change what a training does, and are easily forgotten."""

from collections.abc import Iterable, Mapping

import psutil

from embedtrain.doctor.finding import Finding, Level

_TOPIC = "environment"
_SECRET = ("TOKEN", "KEY", "PASSWORD", "SECRET")
_OF_ACCELERATE = ("ACCELERATE_", "FSDP_")
_READ_BY_US = "FSDP_TRANSFORMER_CLS_TO_WRAP"
# Worth knowing: others read them.
_TOLD = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "WANDB_", "EMBEDTRAIN_")
_TOLD_WHOLE = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "LD_PRELOAD", "PYTHONPATH",
               "TOKENIZERS_PARALLELISM")  # fmt: skip
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_ON = ("1", "true", "yes", "on")
# (variable, values that hurt; None: any) -> what they do, and what to do.
_HURTS: list[tuple[str, tuple[str, ...], str, str]] = [
    ("NCCL_P2P_DISABLE", _ON, "GPUs of a host talk through its memory, several times slower", "Unset it."),
    ("NCCL_SHM_DISABLE", _ON, "ranks of a host talk over the network", "Unset it, and give the container /dev/shm."),
    ("NCCL_IB_DISABLE", _ON, "hosts talk over TCP, not InfiniBand or RoCE", "Unset it where there is such a network."),
    ("NCCL_DEBUG", ("TRACE",), "NCCL writes a line for every operation", "Set NCCL_DEBUG=WARN, or INFO for a while."),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, "every collective stops the host, which then cannot work ahead", "Unset it."),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "a collective of a lost rank never ends", "Unset it."),
    ("CUDA_LAUNCH_BLOCKING", _ON, "every kernel stops the host, which is for finding bugs", "Unset it to train."),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is checked by another one", "Unset it to train."),
    ("CUDA_VISIBLE_DEVICES", ("", "-1"), "it hides all GPUs", "Unset it, or name the GPUs: CUDA_VISIBLE_DEVICES=0,1."),
]


def check_environment(environment: Mapping[str, str], num_hosts: int) -> list[Finding]:
    """What is set, as the process found it.

    Args:
        environment: of the process, before anything was taken out of it.
        num_hosts: that the ranks are on.
    """
    hurting = [finding for finding in (_hurt(environment, *rule) for rule in _HURTS) if finding is not None]
    named = {finding.name for finding in hurting}
    findings = [*_of_accelerate(environment), *hurting]
    for variable in sorted(environment):
        if variable in named:
            continue
        if variable.endswith("SOCKET_IFNAME"):
            findings.append(_of_interface(variable, environment[variable], num_hosts))
        elif variable.lower() in _PROXIES:
            findings.append(Finding(_TOPIC, variable, _without_password(environment[variable]), Level.note,
                                    "Downloads go through it; ranks never do."))  # fmt: skip
        elif variable.startswith(_TOLD) or variable in _TOLD_WHOLE:
            findings.append(Finding(_TOPIC, variable, _shown(variable, environment[variable])))
    return findings or [Finding(_TOPIC, "variables", "none that would interfere")]


def _of_accelerate(environment: Mapping[str, str]) -> Iterable[Finding]:
    names = [name for name in sorted(environment) if name.startswith(_OF_ACCELERATE) and name != _READ_BY_US]
    if names:
        yield Finding(
            _TOPIC,
            "accelerate",
            f"{', '.join(names)}: embedtrain takes them out (with them transformers may load models without weights)",
            Level.warning,
            f"Start with torchrun; parallel.accelerate_config=FILE takes options over: unset {' '.join(names)}",
        )
    if _READ_BY_US in environment:
        do = f"parallel.block_class={environment[_READ_BY_US]} says the same where everybody sees it."
        yield Finding(_TOPIC, _READ_BY_US, f"{environment[_READ_BY_US]} is the class that is sharded", Level.note, do)


def _hurt(environment: Mapping[str, str], name: str, values: tuple[str, ...], text: str, do: str) -> Finding | None:
    if environment.get(name, "unset").strip().lower() not in [value.lower() for value in values]:
        return None
    return Finding(_TOPIC, name, f"{environment[name] or 'empty'}: {text}", Level.warning, do)


def _of_interface(variable: str, value: str, num_hosts: int) -> Finding:
    """Interfaces that ranks talk over: NCCL takes prefixes, `=name` and `^name`."""
    there = sorted(psutil.net_if_addrs())
    wanted = value.lstrip("^=").split(",")
    found = [name for name in there if any(name == one or name.startswith(one) for one in wanted)]
    if not found and not value.startswith("^"):  # what is to be left out need not be there
        do = f"Name one that is there ({', '.join(there)}), or unset it."
        return Finding(_TOPIC, variable, f"{value}: this host has no such interface", Level.problem, do)
    if num_hosts > 1 and not value.startswith("^") and all(name == "lo" for name in found):
        do = f"Name one that reaches the other hosts: {', '.join(name for name in there if name != 'lo')}."
        return Finding(
            _TOPIC, variable, f"{value} does not leave this host, and ranks are on several", Level.problem, do
        )
    return Finding(_TOPIC, variable, value)


def _shown(variable: str, value: str) -> str:
    secret = any(word in variable for word in _SECRET) and variable not in _TOLD_WHOLE
    return "set" if secret and value else _without_password(value) or "empty"


def _without_password(address: str) -> str:
    """An address without what stands before its host; a password may hold anything, so nothing is parsed."""
    before, at, host = address.rpartition("@")
    scheme, found, _ = before.partition("://")
    return f"{scheme + found if found else ''}...@{host}" if at else address
