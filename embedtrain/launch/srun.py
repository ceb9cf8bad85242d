"""A rank that srun has started: its place among the others, read off SLURM's variables before anything else runs.

`srun python -m embedtrain ...` starts as many processes as it has tasks; without this each would train alone.
"""

from collections.abc import MutableMapping

from embedtrain.errors import ConfigError
from embedtrain.launch.interface import interface_towards
from embedtrain.launch.nodes import address_of, node_names, tasks_of_nodes

_FIRST_PORT, _PORTS = 10000, 20000  # below what Linux gives to connections (32768 and above)
_STEP_APART = 997  # a prime: steps of one job, and jobs that follow each other, do not take one port


def take_place(environment: MutableMapping[str, str]) -> None:
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
    tasks = tasks_of_nodes(_text(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
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
        environment["MASTER_ADDR"] = address_of(names[0]) if several else "127.0.0.1"
    if "MASTER_PORT" not in environment:
        job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
        environment["MASTER_PORT"] = str(_FIRST_PORT + (job + _STEP_APART * step) % _PORTS)
    if several and "GLOO_SOCKET_IFNAME" not in environment:
        # The first node cannot tell by itself how the others reach it: it looks towards the second one.
        other = environment["MASTER_ADDR"] if node > 0 else address_of(names[1])
        interface = interface_towards(other)
        if interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface


def _look_towards_the_others(environment: MutableMapping[str, str]) -> None:
    """Choose gloo's interface below the torchruns that a job of `submit` has started, one a node."""
    addresses = environment.get("NODE_ADDRESSES", "").split()
    node = environment.get("SLURM_NODEID", "")
    if len(addresses) > 1 and node.isdecimal() and "GLOO_SOCKET_IFNAME" not in environment:
        interface = interface_towards(addresses[0 if int(node) else 1])
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
