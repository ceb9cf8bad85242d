"""Whatever builds and runs images here: docker, podman, or buildah as root without an engine.

Which one is found by trying: a docker client without an engine is none. What a machine needs of its own is told by its
environment, and is no part of an image:

    EMBEDTRAIN_IMAGE_BASE         an image to build on instead of the Dockerfile's, where that cannot be pulled
    EMBEDTRAIN_IMAGE_TORCH_INDEX  the index that torch is installed from, where the Dockerfile's is out of reach
    EMBEDTRAIN_IMAGE_DIR          where buildah keeps images and layers; default: /var/tmp/embedtrain-images
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

DIRECTORY = Path(os.environ.get("EMBEDTRAIN_IMAGE_DIR", "/var/tmp/embedtrain-images"))
_DEBIAN = "localhost/embedtrain-base:bookworm"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images.

    Attributes:
        program: docker, podman or buildah, with the options that all its commands need.
        has_engine: whether it runs containers by itself; buildah does so without one.
    """

    program: tuple[str, ...]
    has_engine: bool

    def build(self, dockerfile: str, tag: str) -> subprocess.CompletedProcess[str]:
        """Build a Dockerfile of the checkout."""
        arguments = []
        base, index = os.environ.get("EMBEDTRAIN_IMAGE_BASE"), os.environ.get("EMBEDTRAIN_IMAGE_TORCH_INDEX")
        command = ["build"] if self.has_engine else ["bud", "--layers", "--network=host", "--format=docker"]
        if not self.has_engine:
            arguments += _of_this_machine()
            if base is None and not self._pulls(dockerfile):
                base = self._debian()
                index = index or "https://pypi.org/simple"
        if base is not None:
            arguments.append(f"--build-arg=BASE={base}")
        if index is not None:
            arguments.append(f"--build-arg=TORCH_INDEX={index}")
        return _call([*self.program, *command, *arguments, "--file", dockerfile, "--tag", tag, "."], timeout=3600)

    def run(
        self, tag: str, command: Sequence[str], *, user: str | None = None, mount: Path, timeout: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container of the image, as the image's user or another, with a folder at /workspace."""
        options = [f"--volume={mount}:/workspace", *([f"--user={user}"] if user else [])]
        if self.has_engine:
            return _call([*self.program, "run", "--rm", *options, tag, *command], timeout=timeout)
        container = _call([*self.program, "from", "--pull-never", tag], timeout=600).stdout.strip()
        try:
            return _call(
                [*self.program, "run", "--network=host", "--hostname=localhost", *options, container, "--", *command],
                timeout=timeout,
            )
        finally:
            _call([*self.program, "rm", container], timeout=600)

    def _pulls(self, dockerfile: str) -> bool:
        found = re.search(r"^ARG BASE=(\S+)", (ROOT / dockerfile).read_text(), re.MULTILINE)
        assert found is not None
        try:
            return (
                _call([*self.program, "pull", "--quiet", f"docker.io/library/{found[1]}"], timeout=60).returncode == 0
            )
        except subprocess.TimeoutExpired:
            return False

    def _debian(self) -> str:
        """Debian with Python, made of its packages."""
        if _call([*self.program, "images", "--quiet", _DEBIAN], timeout=600).returncode:
            rest = DIRECTORY / "base.tar"
            made = rest.with_suffix(".part.tar")
            packages = "--include=ca-certificates,python3,python3-venv"
            done = _call(["mmdebstrap", "--variant=minbase", packages, "bookworm", str(made)], timeout=1800)
            assert done.returncode == 0, done.stderr
            made.rename(rest)
            (DIRECTORY / "Containerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["/bin/bash"]\n')
            file = str(DIRECTORY / "Containerfile")
            done = _call([*self.program, "bud", "--tag", _DEBIAN, "--file", file, str(DIRECTORY)], timeout=900)
            assert done.returncode == 0, done.stderr
            rest.unlink()
        return _DEBIAN


def find_builder() -> Builder | str:
    """A builder that works here; why there is none."""
    for engine in ("docker", "podman"):
        if shutil.which(engine) and _call([engine, "info"], timeout=60).returncode == 0:
            return Builder((engine,), has_engine=True)
    if os.geteuid() != 0:
        return "neither docker nor podman has an engine here, and buildah without one needs root"
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing:
        _call(
            ["apt-get", "-o", "DPkg::Lock::Timeout=600", "install", "-y", "--no-install-recommends", *missing],
            timeout=900,
        )
    if shutil.which("buildah") is None:
        return "there is neither docker with an engine, nor podman, nor buildah, and apt-get could not install it"
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    return Builder(
        ("buildah", "--root", str(DIRECTORY / "store"), "--runroot", str(DIRECTORY / "run")), has_engine=False
    )


def _of_this_machine() -> list[str]:
    """What pip needs of this machine, for RUN alone: certificates, its configuration, and folders that it names."""
    shown = [Path(_CERTIFICATES), Path("/etc/pip.conf"), Path.home() / ".config" / "pip" / "pip.conf"]
    told = subprocess.run(["pip", "config", "list"], check=False, capture_output=True, text=True).stdout
    named = {Path(found) for found in re.findall(r"(?:file://)?(/[\w./-]+)", told)}
    shown += sorted(path.parent if path.name == "simple" else path for path in named)  # an index's files lie beside it
    return [f"--volume={path}:{path}:ro" for path in dict.fromkeys(shown) if path.exists()]


def _call(command: Sequence[str], *, timeout: float) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
    return subprocess.run(
        list(command), check=False, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment
    )
