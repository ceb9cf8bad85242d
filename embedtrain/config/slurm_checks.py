"""Options of `python -m embedtrain.submit` that cannot work, or that would break the script they are written into."""

import re
import shlex
from collections.abc import Callable
from dataclasses import fields

from embedtrain.config.schema import Recipe
from embedtrain.config.slurm import Launcher, SlurmConfig
from embedtrain.errors import ConfigError

_LARGEST_SIGNAL = 65535  # seconds; sbatch takes no more
_UNLIMITED = ("UNLIMITED", "INFINITE")
_TIMES = re.compile(
    r"(?P<m>\d+)(:(?P<s>\d+))?|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<d>\d+)-(?P<dh>\d+)(:(?P<dm>\d+)(:(?P<ds>\d+))?)?"
)
_SECONDS = {"m": 60, "s": 1, "h": 3600, "hm": 60, "hs": 1, "d": 86400, "dh": 3600, "dm": 60, "ds": 1}
# Options of sbatch that the script sets itself -> what to write for them.
_OURS = {
    "nodes": "nodes", "N": "nodes", "gpus-per-node": "gpus_per_node", "gres": "gres", "cpus-per-task": "cpus_per_node",
    "c": "cpus_per_node", "mem": "mem", "exclusive": "exclusive", "time": "time", "t": "time", "partition": "partition",
    "p": "partition", "account": "account", "A": "account", "qos": "qos", "q": "qos", "constraint": "constraint",
    "C": "constraint", "reservation": "reservation", "mail-user": "mail_user", "mail-type": "mail_type",
    "job-name": "job_name", "J": "job_name", "output": "log", "o": "log", "array": "seeds", "a": "seeds",
    "signal": "signal_seconds", "requeue": "requeue", "no-requeue": "requeue", "ntasks-per-node": "ranks_per_node",
    "ntasks": "ranks_per_node", "n": "ranks_per_node",
}  # fmt: skip

Rule = tuple[Callable[[SlurmConfig], bool], Callable[[SlurmConfig], str]]

RULES: list[Rule] = [
    (
        lambda s: s.gpus_per_node < 0,
        lambda s: f"slurm.gpus_per_node={s.gpus_per_node}: a number of GPUs; 0 trains on the CPU",
    ),
    (
        lambda s: s.gpus_per_node == 0 and (s.gres is not None or s.gpu_type is not None),
        lambda s: (
            f"slurm.gpus_per_node=0 with slurm.{'gres' if s.gres is not None else 'gpu_type'}="
            f"{s.gres if s.gres is not None else s.gpu_type}: write how many GPUs that are"
        ),
    ),
    (
        lambda s: s.gres is not None and s.gpu_type is not None,
        lambda s: f"slurm.gres={s.gres} and slurm.gpu_type={s.gpu_type} both name GPUs: keep one",
    ),
    (
        lambda s: (
            s.launcher is Launcher.srun and s.cpus_per_node is not None and s.cpus_per_node % ranks_per_node(s) != 0
        ),
        lambda s: (
            f"slurm.cpus_per_node={s.cpus_per_node} with slurm.launcher=srun: each of the {ranks_per_node(s)} ranks of "
            f"a node gets as many; write a multiple of {ranks_per_node(s)}"
        ),
    ),
    (
        lambda s: s.launcher is Launcher.srun and s.max_restarts > 0,
        lambda s: f"slurm.max_restarts={s.max_restarts} is torchrun's: leave it out, or write slurm.launcher=torchrun",
    ),
    (
        lambda s: s.max_restarts < 0 or s.max_requeues < 0,
        lambda s: f"slurm.max_restarts={s.max_restarts}, slurm.max_requeues={s.max_requeues}: must not be negative",
    ),
    (
        lambda s: not 1 <= s.signal_seconds <= _LARGEST_SIGNAL,
        lambda s: f"slurm.signal_seconds={s.signal_seconds}: seconds before the time limit, 1 to {_LARGEST_SIGNAL}",
    ),
    (
        lambda s: s.time is not None and _TIMES.fullmatch(s.time) is None and s.time.upper() not in _UNLIMITED,
        lambda s: f"slurm.time={s.time}: written as minutes, MM:SS, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
    ),
    (
        lambda s: _seconds(s.time) is not None and (_seconds(s.time) or 0) <= s.signal_seconds,
        lambda s: (
            f"slurm.time={s.time} with slurm.signal_seconds={s.signal_seconds}: the job would be asked to stop as soon "
            f"as it starts; give it more time, or less for its last checkpoint"
        ),
    ),
    (
        lambda s: len(set(s.seeds)) < len(s.seeds),
        lambda s: f"slurm.seeds={s.seeds}: one stands twice, and both would train in one directory",
    ),
    (
        lambda s: s.seeds_at_once is not None and not s.seeds,
        lambda s: f"slurm.seeds_at_once={s.seeds_at_once} is for an array: write slurm.seeds=[1,2,3]",
    ),
    (
        lambda s: s.container_image is not None and s.container_command is not None,
        lambda s: "slurm.container_image and slurm.container_command are both set: the first is for pyxis; keep one",
    ),
    (
        lambda s: bool(s.container_mounts) and s.container_image is None,
        lambda s: (
            "slurm.container_mounts is for slurm.container_image (pyxis): in slurm.container_command write the "
            "option of that command, such as apptainer exec --bind FROM:TO image.sif"
        ),
    ),
    (
        lambda s: s.mail_type is not None and s.mail_user is None,
        lambda s: f"slurm.mail_type={s.mail_type}: to whom? write slurm.mail_user=you@example.org",
    ),
    (
        lambda s: s.log is not None and "\\" in s.log,
        lambda s: f"slurm.log={s.log}: a backslash switches SLURM's patterns off; write a path without it",
    ),
]


def check_slurm(options: SlurmConfig) -> SlurmConfig:
    """The options themselves, if they can work.

    Raises:
        ConfigError: the first rule that is broken.
    """
    _refuse_line_ends(options)
    for name in ("nodes", "ranks_per_node", "cpus_per_node", "seeds_at_once"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"slurm.{name}={value}: at least 1")
    for broken, sentence in RULES:
        if broken(options):
            raise ConfigError(sentence(options))
    if options.container_command is not None:
        try:
            shlex.split(options.container_command)
        except ValueError:
            raise ConfigError(f"slurm.container_command={options.container_command}: a quote is not closed") from None
    for name in ("extra", "srun_extra"):
        for line in getattr(options, name):
            if not line.startswith("-"):
                raise ConfigError(f"slurm.{name}: {line!r} is no option; write it as in --exclude=n13")
    for line in options.extra:
        ours = _OURS.get(re.split(r"[= ]", line.lstrip("-"), maxsplit=1)[0])
        if ours is not None:
            raise ConfigError(f"slurm.extra: {line} is set by the script; write slurm.{ours}= instead")
    return options


def check_run(recipe: Recipe) -> None:
    """What a recipe's name and place must not hold so that they can stand in the script.

    Raises:
        ConfigError: a line end, a backslash or a quote.
    """
    for name in ("name", "output_dir"):
        value = getattr(recipe, name)
        if re.search(r"[\x00-\x1f\x7f\\']", value):
            raise ConfigError(f"{name}={value!r}: without line ends, backslashes and quotes, for a job's script")


def ranks_per_node(options: SlurmConfig) -> int:
    """Ranks of each node: one a GPU unless something else is asked for."""
    return options.ranks_per_node or options.gpus_per_node or 1


def _refuse_line_ends(options: SlurmConfig) -> None:
    for field in fields(options):
        values = getattr(options, field.name)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str) and re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value):
                raise ConfigError(f"slurm.{field.name}={value!r}: one line each, without control characters")


def _seconds(time: str | None) -> int | None:
    """A time limit in seconds; None: there is none, or it is no time."""
    found = None if time is None else _TIMES.fullmatch(time)
    if found is None:
        return None
    return sum(int(number) * _SECONDS[unit] for unit, number in found.groupdict().items() if number is not None)
