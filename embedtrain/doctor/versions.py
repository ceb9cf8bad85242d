"""Installed packages against the ranges that embedtrain works in, which are its own metadata."""

import importlib.metadata
import platform
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from embedtrain.doctor.finding import Finding, Level

_TOPIC = "versions"


def check_versions() -> list[Finding]:
    """Python, embedtrain, every package that it needs, and what torch was built with."""
    import torch

    findings = [Finding(_TOPIC, "python", f"{platform.python_version()} on {platform.platform(terse=True)}")]
    try:
        about = importlib.metadata.metadata("embedtrain")
        needed = importlib.metadata.requires("embedtrain") or []
    except importlib.metadata.PackageNotFoundError:
        why = "not compared with their ranges, because embedtrain is not installed (it runs from a folder)"
        findings.append(Finding(_TOPIC, "packages", why, Level.note, "Install it: pip install ."))
    else:
        asked = SpecifierSet(about["Requires-Python"] or "")
        if not asked.contains(platform.python_version()):
            findings[0] = Finding(_TOPIC, "python", f"{platform.python_version()}, needed is {asked}", Level.problem,
                                  f"Make an environment with a Python {asked}.")  # fmt: skip
        findings += _of_packages(about["Version"], needed)
    return [*findings, _of_cuda(torch.version.cuda)]


def _of_packages(own: str, needed: list[str]) -> list[Finding]:
    fine, wrong = [f"embedtrain {own}"], []
    for requirement in map(Requirement, needed):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, asked = requirement.name, requirement.specifier
        do = f"pip install '{name}{asked}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(Finding(_TOPIC, name, f"is not installed, needed is {asked}", Level.problem, do))
            continue
        if asked.contains(version, prereleases=True):
            fine.append(f"{name} {version}")
        else:
            wrong.append(Finding(_TOPIC, name, f"{version} is installed, needed is {asked}", Level.problem, do))
    return [Finding(_TOPIC, "packages", ", ".join(fine)), *wrong]


def _of_cuda(built_with: str | None) -> Finding:
    import torch

    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    if built_with is None:
        text = "torch is built for CPUs"
        if has_gpu:
            do = "Install torch for CUDA, as https://pytorch.org/get-started says."
            return Finding(_TOPIC, "cuda", f"{text}, but this machine has an NVIDIA GPU", Level.problem, do)
        return Finding(_TOPIC, "cuda", text)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if sys.platform == "linux" else "none"
    text = f"torch is built with CUDA {built_with}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    if has_gpu and not torch.cuda.is_available():
        do = f"Update the driver to one for CUDA {built_with}, or install a torch for the driver's CUDA (nvidia-smi)."
        return Finding(_TOPIC, "cuda", f"{text}; torch cannot use this machine's GPU", Level.problem, do)
    return Finding(_TOPIC, "cuda", text)
