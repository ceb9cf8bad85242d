"""Builds and runs images with docker, podman, or buildah as root without an engine.

Settings of this machine come from the environment and are no part of an image:

    EMBEDTRAIN_IMAGE_BASE         base image, if the Dockerfile's cannot be pulled
    EMBEDTRAIN_IMAGE_TORCH_INDEX  package index for torch, if the Dockerfile's cannot be reached
    EMBEDTRAIN_IMAGE_DIR          directory of buildah's images and layers; default: /var/tmp/embedtrain-images
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
        has_engine: whether it has an engine for containers; buildah has none.
    """

    program: tuple[str, ...]
    has_engine: bool

    def build(self, dockerfile: str, tag: str) -> subprocess.CompletedProcess[str]:
        """Build a Dockerfile of the checkout."""
        arguments = []
        base, index = os.environ.get("EMBEDTRAIN_IMAGE_BASE"), os.environ.get("EMBEDTRAIN_IMAGE_TORCH_INDEX")
        command = ["build"] if self.has_engine else ["bud", "--layers", "--network=host", "--format=docker"]
        if not self.has_engine:
            arguments += _pip_volumes()
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
        match = re.search(r"^ARG BASE=(\S+)", (ROOT / dockerfile).read_text(), re.MULTILINE)
        assert match is not None
        try:
            return (
                _call([*self.program, "pull", "--quiet", f"docker.io/library/{match[1]}"], timeout=60).returncode == 0
            )
        except subprocess.TimeoutExpired:
            return False

    def _debian(self) -> str:
        """An image of Debian with Python, built from packages."""
        if _call([*self.program, "images", "--quiet", _DEBIAN], timeout=600).returncode:
            archive = DIRECTORY / "base.tar"
            unfinished = archive.with_suffix(".part.tar")
            packages = "--include=ca-certificates,python3,python3-venv"
            done = _call(["mmdebstrap", "--variant=minbase", packages, "bookworm", str(unfinished)], timeout=1800)
            assert done.returncode == 0, done.stderr
            unfinished.rename(archive)
            (DIRECTORY / "Containerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["/bin/bash"]\n')
            file = str(DIRECTORY / "Containerfile")
            done = _call([*self.program, "bud", "--tag", _DEBIAN, "--file", file, str(DIRECTORY)], timeout=900)
            assert done.returncode == 0, done.stderr
            archive.unlink()
        return _DEBIAN


def find_builder() -> Builder | str:
    """A builder that works on this machine, or why there is none."""
    for engine in ("docker", "podman"):
        if shutil.which(engine) and _call([engine, "info"], timeout=60).returncode == 0:
            return Builder((engine,), has_engine=True)
    if os.geteuid() != 0:
        return "docker and podman have no engine, and buildah needs root"
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing:
        _call(
            ["apt-get", "-o", "DPkg::Lock::Timeout=600", "install", "-y", "--no-install-recommends", *missing],
            timeout=900,
        )
    if shutil.which("buildah") is None:
        return "docker, podman and buildah are missing, and apt-get could not install buildah"
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    return Builder(
        ("buildah", "--root", str(DIRECTORY / "store"), "--runroot", str(DIRECTORY / "run")), has_engine=False
    )


def _pip_volumes() -> list[str]:
    """Volumes that pip needs during RUN: certificates, its configuration, and directories in it."""
    paths = [Path(_CERTIFICATES), Path("/etc/pip.conf"), Path.home() / ".config" / "pip" / "pip.conf"]
    configuration = subprocess.run(["pip", "config", "list"], check=False, capture_output=True, text=True).stdout
    configured = {Path(path) for path in re.findall(r"(?:file://)?(/[\w./-]+)", configuration)}
    paths += sorted(path.parent if path.name == "simple" else path for path in configured)  # with the index's files
    return [f"--volume={path}:{path}:ro" for path in dict.fromkeys(paths) if path.exists()]


def _call(command: Sequence[str], *, timeout: float) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
    return subprocess.run(
        list(command), check=False, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment
    )
