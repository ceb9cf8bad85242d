"""SLURM's compressed lists: `n[1-4,07]` -> names, `2(x3),1` -> numbers of tasks; and where a node is reached."""

import re
import socket

from embedtrain.errors import ConfigError
from embedtrain.launch.commands import call

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# A list that would not end: no cluster has as many.
_MOST = 1_000_000


def node_names(compressed: str) -> list[str]:
    """The names that a node list of SLURM's stands for, in its order.

    Raises:
        ConfigError: it cannot be read.
    """
    return [name for part in _parts(compressed) for name in _expanded(part, compressed)]


def tasks_of_nodes(compressed: str) -> list[int]:
    """Numbers of tasks, node by node: `2(x3),1` -> 2, 2, 2, 1.

    Raises:
        ConfigError: it cannot be read.
    """
    tasks: list[int] = []
    for part in compressed.split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None or int(found[2] or 1) > _MOST:
            raise ConfigError(f"SLURM's list of tasks {compressed!r} cannot be read: start with torchrun instead")
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def address_of(name: str) -> str:
    """Where a node is reached: its name, or what SLURM has as its address where the name means nothing here."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return _node_addr(name) or name
    return name


def _node_addr(name: str) -> str | None:
    answer = call("scontrol", "--oneliner", "show", "node", name)  # in a container it mostly is not there
    found = None if answer is None else re.search(r"\bNodeAddr=(\S+)", answer[1])
    return found[1] if found else None


def _parts(compressed: str) -> list[str]:
    """Pieces between commas that stand in no brackets."""
    parts, depth = [""], 0
    for letter in compressed.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _expanded(part: str, whole: str) -> list[str]:
    """The names of one piece, the first brackets in it varying slowest."""
    found = _BRACKETS.search(part)
    if found is None:
        if not part or "[" in part or "]" in part:
            raise _unreadable(whole)
        return [part]
    names: list[str] = []
    for numbers in found[1].split(","):
        first, _, last = numbers.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) <= _MOST):
            raise _unreadable(whole)
        middle = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        names += [f"{part[: found.start()]}{number}{part[found.end() :]}" for number in middle]
    return [name for each in names for name in _expanded(each, whole)]


def _unreadable(whole: str) -> ConfigError:
    return ConfigError(f"SLURM's list of nodes {whole!r} cannot be read: set MASTER_ADDR to the first node's address")
