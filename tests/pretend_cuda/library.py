"""The C++ part of the pretended device: compiled once, loaded before torch. Imports no torch."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

SOURCE = Path(__file__).parent / "device.cpp"
# Ignored by git. A compilation takes ten seconds, so it is kept for later test runs.
BUILD = Path(__file__).resolve().parents[2] / "build" / "pretend-cuda"


class CannotBuild(Exception):
    """Why this machine cannot have a pretended device."""


def build_library() -> Path:
    """The compiled library for the installed torch. Raises CannotBuild with the reason."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotBuild("the pretended CUDA device needs g++")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch, version = Path(spec.origin).parent, importlib.metadata.version("torch")
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild(f"the pretended CUDA device needs a torch without CUDA, and this is torch {version} with it")
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{version} {torch}".encode()).hexdigest()[:16]
    library = BUILD / f"device-{digest}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{library}.lock"):
        if library.exists():
            return library
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            built = Path(folder) / "device.so"
            command = [
                compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(built),
                f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}",
                "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotBuild(f"g++ cannot compile {SOURCE.name} for torch {version}: {done.stderr.strip()[:300]}")
            os.replace(built, library)
    return library


def open_device(library: str) -> Any:
    """Install the pretended device in this process, which must not have imported torch, and return it."""
    # Importing torch looks its CUDA hooks up once and for all, so they have to be registered before.
    assert "torch" not in sys.modules, "torch is imported already"
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    from tests.pretend_cuda.device import install

    return install()
