"""Hosts that are network namespaces of this machine, joined by a switch, with cables that can be taken out.

The switch lies in a namespace of its own, so this machine's own network is never touched.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_ADDRESS = "10.91.0"
_NAMES = Path("/etc/netns")  # `ip netns exec` shows a host its own /etc/hosts from there


def why_not() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "iproute2"], check=False, capture_output=True
        )
    if shutil.which("ip") is None:
        return "there is no `ip` (package iproute2)"
    tried = subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"], check=False, capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespace can be created: {tried.stderr.strip()}"
    _ip("netns", "del", f"try{os.getpid()}")
    return None


@dataclass(slots=True)
class Network:
    """`count` hosts on one switch. A host's name is known to all of them, and its only way to them is `eth0`.

    Args:
        count: how many.
        prefix: begins the hosts' names; at most six characters, for an interface's name has 15.
    """

    count: int
    prefix: str

    def name(self, host: int) -> str:
        return f"{self.prefix}h{host}"

    def address(self, host: int) -> str:
        return f"{_ADDRESS}.{host + 1}"

    @property
    def _switch(self) -> str:
        return f"{self.prefix}sw"

    def up(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge0", "up")
        names = "127.0.0.1 localhost\n"
        names += "".join(f"{self.address(host)} {self.name(host)}\n" for host in range(self.count))
        for host in range(self.count):
            name, port = self.name(host), f"port{host}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            (_NAMES / name).mkdir(parents=True, exist_ok=True)
            (_NAMES / name / "hosts").write_text(names)

    def down(self) -> None:
        for name in (*(self.name(host) for host in range(self.count)), self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(_NAMES / name, ignore_errors=True)

    def start(
        self, host: int, command: Sequence[str], *, folder: Path, log: IO[str], environment: dict[str, str]
    ) -> "subprocess.Popen[str]":
        """Start a command on a host, which has its own name as well. Its process is the command's."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name(host)]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name(host), *named, *command],
            cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment},
        )  # fmt: skip

    def cut(self, host: int) -> None:
        """Disconnect it at the switch without notice: packets are lost."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        """Put it back."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
