"""A rank that srun has started: its place among the others, read off SLURM's variables before anything else runs.

`srun python -m embedtrain ...` starts as many processes as it has tasks; without this each would train alone.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, MutableMapping

import psutil

from embedtrain.errors import ConfigError


def interface_for(address: str) -> str | None:
    """The name of the interface through which an address is reached; None: nobody can tell.

    Args:
        address: a host's name or IP address.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it asks for the way
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address.partition("%")[0] == own for each in addresses):
            return str(name)
    return None


# The controller of a busy cluster may be slow to answer.
_PATIENCE = 120.0


def call(*words: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str] | None:
    """Exit code, standard output and standard error of a command; None: it is not there, or did not answer."""
    program = shutil.which(words[0])
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603  (no shell: words stay words)
            [program, *words[1:]],
            env=dict(os.environ if environment is None else environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode, done.stdout, done.stderr


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


def tasks_per_node(compressed: str) -> list[int]:
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


def node_address(name: str) -> str:
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


_FIRST_PORT, _PORTS = 10000, 20000  # below what Linux gives to connections (32768 and above)
_STEP_APART = 997  # a prime: steps of one job, and jobs that follow each other, do not take one port


def set_ranks_from_srun(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun would.

    Nothing is done unless srun started several tasks and no other launcher stands between: in a batch script's own
    shell, in that of salloc and in a step of one task a plain `python -m embedtrain` stays one process. Ranks are
    counted node by node, whatever srun's --distribution: those of a node lie beside each other.

    Raises:
        ConfigError: variables contradict each other; on every task alike.
    """
    if "RANK" in environment:
        _look_towards_the_others(environment)
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    # A batch script has SLURM_PROCID=0 and SLURM_NTASKS too; of the step's own variables it has none.
    if size == "1" or "SLURM_PROCID" not in environment or "RANK" in environment:
        return
    if (given := environment.get("WORLD_SIZE", size)) != size:
        raise ConfigError(f"WORLD_SIZE={given} in the environment, and srun has started {size} tasks: unset it")
    node, local_rank, num_tasks = (
        _number(environment, name) for name in ("SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    )
    tasks = tasks_per_node(_text(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if sum(tasks) != num_tasks or not node < len(tasks) or not local_rank < tasks[node]:
        raise ConfigError(
            f"SLURM's variables contradict each other (SLURM_STEP_NUM_TASKS={num_tasks}, "
            f"SLURM_STEP_TASKS_PER_NODE={tasks}, SLURM_NODEID={node}, SLURM_LOCALID={local_rank}), as in a step of "
            "several components: start with torchrun instead"
        )
    names = node_names(_text(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    environment.update(
        {
            "RANK": str(sum(tasks[:node]) + local_rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(tasks[node]),
        }
    )
    several = len(tasks) > 1
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = node_address(names[0]) if several else "127.0.0.1"
    if "MASTER_PORT" not in environment:
        job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
        environment["MASTER_PORT"] = str(_FIRST_PORT + (job + _STEP_APART * step) % _PORTS)
    if several and "GLOO_SOCKET_IFNAME" not in environment:
        # The first node cannot tell by itself how the others reach it: it looks towards the second one.
        other = environment["MASTER_ADDR"] if node > 0 else node_address(names[1])
        interface = interface_for(other)
        if interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface


def _look_towards_the_others(environment: MutableMapping[str, str]) -> None:
    """Choose gloo's interface below the torchruns that a job of `submit` has started, one a node."""
    addresses = environment.get("NODE_ADDRESSES", "").split()
    node = environment.get("SLURM_NODEID", "")
    if len(addresses) > 1 and node.isdecimal() and "GLOO_SOCKET_IFNAME" not in environment:
        interface = interface_for(addresses[0 if int(node) else 1])
        if interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface


def _text(environment: MutableMapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return environment[name]
    raise ConfigError(f"srun has started several tasks, and {names[0]} is not set: start with torchrun instead")


def _number(environment: MutableMapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} in the environment is not a number")
    return int(text)
