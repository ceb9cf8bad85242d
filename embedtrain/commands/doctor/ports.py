"""Whether the ranks and torchrun listen on more network interfaces than they need."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from embedtrain.commands.doctor.finding import Finding, Level
from embedtrain.distributed.watchdog.launcher import find_launcher
from embedtrain.distributed.world import World

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
