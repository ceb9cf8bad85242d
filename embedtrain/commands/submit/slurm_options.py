"""Options of a SLURM job, their checks, and the cluster's file of them."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum

import yaml

from embedtrain.config.arguments import option_of, quote
from embedtrain.config.command_options import NodeOptions
from embedtrain.config.limits import load_yaml
from embedtrain.config.validation import OptionChecks, unknown_option
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user


class Launcher(str, Enum):
    """What starts the ranks of a node."""

    torchrun = "torchrun"  # srun starts one task per node, which starts the ranks
    srun = "srun"  # one task per rank, no torchrun


@dataclass(kw_only=True)
class SlurmConfig(NodeOptions):
    """One job, or one per seed. Flat, because its fields mirror the options of sbatch and keys of a cluster file."""

    dry_run: bool = False  # print the script, write and submit nothing
    cluster: str | None = None  # YAML file with these options for your cluster; the command line overrides it
    gpu_type: str | None = None  # requests --gpus-per-node=TYPE:N
    gres: str | None = None  # requested instead of --gpus-per-node, such as gpu:a100:8
    exclusive: bool = False  # whole nodes, without other jobs
    time: str | None = None  # limit as minutes, H:MM:SS, D-HH or D-HH:MM:SS; default: the partition's
    partition: str | None = None  # default: the cluster's
    account: str | None = None  # to charge
    qos: str | None = None  # quality of service, with its limits and priority
    constraint: str | None = None  # features of the nodes, such as a100&nvlink
    reservation: str | None = None  # whose nodes to use
    mail_user: str | None = None  # address for mails
    mail_type: str | None = None  # events, such as END,FAIL,REQUEUE; default with mail_user: END,FAIL
    job_name: str | None = None  # default: the recipe's name
    log: str | None = None  # with SLURM's patterns; default: slurm-%j.log in the run directory (%A_%a for an array)
    extra: list[str] = field(default_factory=list)  # further options of sbatch, such as --exclude=n13
    srun_extra: list[str] = field(default_factory=list)  # further options of srun, such as --mpi=none
    seeds: list[int] = field(default_factory=list)  # one job of an array per seed, in OUTPUT_DIR/seed-S
    seeds_at_once: int | None = None  # that run at the same time; default: all
    launcher: Launcher = Launcher.torchrun  # of the ranks
    python: str | None = None  # default: the interpreter that submits; in a container `python`
    setup: list[str] = field(default_factory=list)  # shell commands before it: module load, source, export
    container_image: str | None = None  # of srun --container-image (the pyxis plugin)
    container_mounts: list[str] = field(default_factory=list)  # FROM:TO; default: the working directory
    container_command: str | None = None  # or a command before python, such as apptainer exec --nv image.sif
    doctor: bool = False  # check all nodes first; a problem ends the job before the command starts
    signal_seconds: int = 300  # before the time limit, the ranks are asked for a checkpoint
    requeue: bool = True  # after a time limit, a preemption or the loss of a node
    max_requeues: int = 100  # starts after the first, for any reason
    max_restarts: int = 0  # restarts of all ranks by torchrun within the job after one has failed


_MAX_SIGNAL_SECONDS = 65535  # seconds; sbatch takes no more
_UNLIMITED = ("UNLIMITED", "INFINITE")
_TIMES = re.compile(
    r"(?P<m>\d+)(:(?P<s>\d+))?|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<d>\d+)-(?P<dh>\d+)(:(?P<dm>\d+)(:(?P<ds>\d+))?)?"
)
_SECONDS = {"m": 60, "s": 1, "h": 3600, "hm": 60, "hs": 1, "d": 86400, "dh": 3600, "dm": 60, "ds": 1}
# Options of sbatch that the script sets, and the field for each.
_SET_BY_SCRIPT = {
    "nodes": "nodes", "N": "nodes", "gpus-per-node": "gpus_per_node", "gres": "gres", "cpus-per-task": "cpus_per_node",
    "c": "cpus_per_node", "mem": "mem", "exclusive": "exclusive", "time": "time", "t": "time", "partition": "partition",
    "p": "partition", "account": "account", "A": "account", "qos": "qos", "q": "qos", "constraint": "constraint",
    "C": "constraint", "reservation": "reservation", "mail-user": "mail_user", "mail-type": "mail_type",
    "job-name": "job_name", "J": "job_name", "output": "log", "o": "log", "array": "seeds", "a": "seeds",
    "signal": "signal_seconds", "requeue": "requeue", "no-requeue": "requeue", "ntasks-per-node": "ranks_per_node",
    "ntasks": "ranks_per_node", "n": "ranks_per_node",
}  # fmt: skip


def check_slurm(slurm: SlurmConfig) -> SlurmConfig:
    """The options, checked; ConfigError names the first that is invalid."""
    check = OptionChecks(slurm, "slurm.")
    for option in fields(slurm):
        value = getattr(slurm, option.name)
        is_safe = not any(map(has_control_characters, value if isinstance(value, list) else [value]))
        check.require(is_safe, option.name, "one line each, without control characters")
    for name in ("nodes", "ranks_per_node", "cpus_per_node", "seeds_at_once"):
        check.at_least(1, name)
    for name in ("gpus_per_node", "max_restarts", "max_requeues"):
        check.at_least(0, name)
    gpu_options = [name for name in ("gres", "gpu_type") if getattr(slurm, name) is not None]
    check.require(len(gpu_options) < 2, "gres", f"gpu_type={slurm.gpu_type} names GPUs as well; keep one")
    has_gpus = slurm.gpus_per_node > 0 or not gpu_options
    check.require(has_gpus, "gpus_per_node", f"{''.join(gpu_options)} asks for GPUs; write how many")
    ranks = ranks_per_node(slurm)
    if slurm.launcher is Launcher.srun:
        message = f"must be a multiple of the {ranks} ranks of a node with launcher=srun"
        check.require((slurm.cpus_per_node or 0) % ranks == 0, "cpus_per_node", message)
        check.require(slurm.max_restarts == 0, "max_restarts", "is for launcher=torchrun")
    check.within(1, _MAX_SIGNAL_SECONDS, "signal_seconds")
    is_time = slurm.time is None or _TIMES.fullmatch(slurm.time) is not None or slurm.time.upper() in _UNLIMITED
    check.require(is_time, "time", "must be minutes, MM:SS, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS")
    limit = _seconds(slurm.time)
    check.require(
        limit is None or limit > slurm.signal_seconds,
        "time",
        f"must be longer than signal_seconds={slurm.signal_seconds}, or the job is signalled as soon as it starts",
    )
    check.require(len(set(slurm.seeds)) == len(slurm.seeds), "seeds", "must differ: each seed has its own directory")
    has_array = slurm.seeds_at_once is None or bool(slurm.seeds)
    check.require(has_array, "seeds_at_once", "is for an array; write slurm.seeds")
    check.require(
        slurm.container_image is None or slurm.container_command is None,
        "container_image",
        "container_command is set as well, which is for other containers than those of pyxis; keep one",
    )
    check.require(
        not slurm.container_mounts or slurm.container_image is not None,
        "container_mounts",
        "is for container_image (pyxis); in container_command write the option of that command, such as "
        "apptainer exec --bind FROM:TO image.sif",
    )
    has_address = slurm.mail_type is None or slurm.mail_user is not None
    check.require(has_address, "mail_type", "needs an address; write slurm.mail_user=you@example.org")
    check.require("\\" not in (slurm.log or ""), "log", "a backslash switches SLURM's patterns off; leave it out")
    check.require(_is_shell_words(slurm.container_command or ""), "container_command", "a quote is not closed")
    for name in ("extra", "srun_extra"):
        are_options = all(line.startswith("-") for line in getattr(slurm, name))
        check.require(are_options, name, "must be options such as --exclude=n13")
    for line in slurm.extra:
        option_name = _SET_BY_SCRIPT.get(re.split(r"[= ]", line.lstrip("-"), maxsplit=1)[0])
        check.require(option_name is None, "extra", f"{line} is set by the script; write slurm.{option_name}= instead")
    return slurm


def ranks_per_node(options: SlurmConfig) -> int:
    """The number of ranks of each node: by default one per GPU."""
    return options.ranks_per_node or options.gpus_per_node or 1


def has_control_characters(value: object) -> bool:
    """Whether a text contains control characters other than tabs."""
    return isinstance(value, str) and re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value) is not None


def _is_shell_words(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True


def _seconds(time: str | None) -> int | None:
    """A time limit in seconds; None if there is none."""
    match = _TIMES.fullmatch(time or "")
    if match is None:
        return None
    return sum(int(number) * _SECONDS[unit] for unit, number in match.groupdict().items() if number is not None)


_LIST_OPTIONS = [field.name for field in fields(SlurmConfig) if field.type == list[str]]
_NULLS = ("", "null", "~", "Null", "NULL")


def read_cluster(arguments: Sequence[str]) -> list[str]:
    """The options in the file that `slurm.cluster` names, as arguments."""
    paths = [argument.partition("=")[2] for argument in arguments if option_of(argument) == "slurm.cluster"]
    if not paths or paths[-1] in _NULLS:
        return []
    path = expand_user(paths[-1].strip("'\""))
    try:
        # Scalars as they are written: YAML reads 24:00:00 as a number.
        options = load_yaml(path, yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"slurm.cluster={path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"slurm.cluster={path}: must have lines such as `partition: gpu`")
    allowed = [field.name for field in fields(SlurmConfig) if field.name not in ("cluster", "dry_run")]
    cluster_arguments = []
    for name, value in options.items():
        if name not in allowed:
            raise ConfigError(f"slurm.cluster={path}: {unknown_option(name, allowed)}")
        if isinstance(value, dict) or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
            raise ConfigError(f"slurm.cluster={path}: {name} must be a single value, or a list of them")
        if isinstance(value, list):
            text = f"[{','.join(quote(item) if name in _LIST_OPTIONS else item for item in value)}]"
        else:
            text = value or "null"
        cluster_arguments.append(f"slurm.{name}={text}")
    return cluster_arguments
