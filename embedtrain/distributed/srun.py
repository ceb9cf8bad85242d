"""Sets the rank of a process started by srun from SLURM's variables, and what mpirun does not call as torchrun does.

`srun python -m embedtrain ...` starts one process per task; without this, each would train alone.
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
    """The name of the network interface that leads to a host name or IP address; None if unknown."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing, but selects the route
            own_address = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == family and entry.address.partition("%")[0] == own_address for entry in addresses):
            return str(name)
    return None


# The controller of a busy cluster may be slow to answer.
_CALL_TIMEOUT = 120.0  # seconds


def call(*words: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str] | None:
    """Exit code, standard output and standard error of a command of SLURM; None if it is missing or does not answer."""
    program = shutil.which(words[0])
    if program is None:
        return None
    try:
        process = subprocess.run(  # noqa: S603  (no shell: words stay words)
            [program, *words[1:]],
            env=dict(os.environ if environment is None else environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_CALL_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.returncode, process.stdout, process.stderr


_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# Limits lists that would not end: no cluster has as many nodes.
_MAX_NODES = 1_000_000


def node_names(compressed: str) -> list[str]:
    """The names in a compressed node list of SLURM: `n[1-3,07]` -> n1, n2, n3, n07."""
    return [name for part in _parts(compressed) for name in _expanded(part, compressed)]


def tasks_per_node(compressed: str) -> list[int]:
    """The number of tasks of each node: `2(x3),1` -> 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in compressed.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MAX_NODES:
            raise ConfigError(f"SLURM's list of tasks {compressed!r} cannot be read: start with torchrun instead")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def node_address(name: str) -> str:
    """The address of a node: its name, or the address that SLURM knows if the name does not resolve."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return _node_addr(name) or name
    return name


def _node_addr(name: str) -> str | None:
    answer = call("scontrol", "--oneliner", "show", "node", name)  # usually missing in a container
    match = None if answer is None else re.search(r"\bNodeAddr=(\S+)", answer[1])
    return match[1] if match else None


def _parts(compressed: str) -> list[str]:
    """The parts between commas outside brackets."""
    parts, depth = [""], 0
    for letter in compressed.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _expanded(part: str, whole: str) -> list[str]:
    """The names of one part; the first brackets vary slowest."""
    match = _BRACKETS.search(part)
    if match is None:
        if not part or "[" in part or "]" in part:
            raise _unreadable(whole)
        return [part]
    names: list[str] = []
    for numbers in match[1].split(","):
        first, _, last = numbers.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) <= _MAX_NODES):
            raise _unreadable(whole)
        middle = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        names += [f"{part[: match.start()]}{number}{part[match.end() :]}" for number in middle]
    return [expanded for name in names for expanded in _expanded(name, whole)]


def _unreadable(whole: str) -> ConfigError:
    return ConfigError(f"SLURM's list of nodes {whole!r} cannot be read: set MASTER_ADDR to the first node's address")


_FIRST_PORT, _PORTS = 10000, 20000  # below the ports that Linux uses for connections (32768 and above)
_STEP_STRIDE = 997  # a prime: steps of one job, and consecutive jobs, get different ports


def set_ranks_from_srun(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun would.

    Does nothing unless srun started several tasks and no other launcher runs below it: in the shell of a batch script
    or of salloc, and in a step with one task, a plain `python -m embedtrain` stays one process. The ranks of a node
    are consecutive, whatever srun's --distribution says.
    """
    if "RANK" in environment:
        _set_interface_below_torchrun(environment)
        _set_local_rank(environment)
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    # A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but no variables of a step.
    if size == "1" or "SLURM_PROCID" not in environment or "RANK" in environment:
        return
    if (world_size := environment.get("WORLD_SIZE", size)) != size:
        raise ConfigError(f"WORLD_SIZE={world_size} in the environment, but srun started {size} tasks: unset it")
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
    has_several_nodes = len(tasks) > 1
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = node_address(names[0]) if has_several_nodes else "127.0.0.1"
    if "MASTER_PORT" not in environment:
        job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
        environment["MASTER_PORT"] = str(_FIRST_PORT + (job + _STEP_STRIDE * step) % _PORTS)
    if has_several_nodes and "GLOO_SOCKET_IFNAME" not in environment:
        # The first node does not know how the others reach it: it uses the interface that leads to the second one.
        other = environment["MASTER_ADDR"] if node > 0 else node_address(names[1])
        interface = interface_for(other)
        if interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface


# Of Open MPI, and of MPICH and Intel MPI. SLURM's come last: below mpirun they are those of its daemon.
_LOCAL_RANK_AND_SIZE = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _set_local_rank(environment: MutableMapping[str, str]) -> None:
    """Set LOCAL_RANK and LOCAL_WORLD_SIZE of a rank that has only RANK and WORLD_SIZE, if its launcher tells them."""
    size = environment.get("WORLD_SIZE", "1")
    if size == "1" or {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environment.keys():
        return
    known = [(environment[r], environment[s]) for r, s in _LOCAL_RANK_AND_SIZE if {r, s} <= environment.keys()]
    if not known and {"SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"} <= environment.keys():
        tasks, node = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"]), _number(environment, "SLURM_NODEID")
        if str(sum(tasks)) == size and node < len(tasks):
            known = [(environment["SLURM_LOCALID"], str(tasks[node]))]
    for local_rank, local_size in known[:1]:
        environment.setdefault("LOCAL_RANK", local_rank)
        environment.setdefault("LOCAL_WORLD_SIZE", local_size)


def _set_interface_below_torchrun(environment: MutableMapping[str, str]) -> None:
    """Set gloo's interface in the ranks of a job of `submit`, which starts one torchrun per node."""
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
    raise ConfigError(f"srun started several tasks, but {names[0]} is not set: start with torchrun instead")


def _number(environment: MutableMapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} in the environment is not a number")
    return int(text)
