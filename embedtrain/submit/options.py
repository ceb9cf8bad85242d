"""Options of `python -m embedtrain.submit`, under `slurm.`: what is asked of the cluster, and how the job behaves."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path

import yaml

from embedtrain.config.accelerate import apply_accelerate_config
from embedtrain.config.checks import check_recipe
from embedtrain.config.compose import compose_command, compose_training, to_recipe
from embedtrain.config.messages import unknown_option
from embedtrain.config.recipe import Recipe
from embedtrain.errors import ConfigError


class Launcher(str, Enum):
    """What starts the ranks of a node.

    `torchrun`: srun starts one task a node, torchrun the ranks in it. `srun`: one task a rank, no torchrun.
    """

    torchrun = "torchrun"
    srun = "srun"


@dataclass(kw_only=True)
class SlurmConfig:
    """One job, or one array of jobs for several seeds."""

    dry_run: bool = False  # show the script, write and submit nothing
    cluster: str | None = None  # a YAML file with options of this list, for your cluster; the command line wins
    # What is asked for.
    nodes: int = 1  # machines
    gpus_per_node: int = 8  # 0: none, training on the CPU
    gpu_type: str | None = None  # asks for --gpus-per-node=TYPE:N
    gres: str | None = None  # asked for instead of --gpus-per-node, such as gpu:a100:8
    ranks_per_node: int | None = None  # default: one a GPU; 1 where there is none
    cpus_per_node: int | None = None  # default: what the cluster gives, often a single one
    mem: str | None = None  # of a node, such as 500G; 0: all of it
    exclusive: bool = False  # whole nodes, alone on them
    time: str | None = None  # limit, in SLURM's forms: minutes, H:MM:SS, D-HH, D-HH:MM:SS; default: the partition's
    partition: str | None = None  # default: the cluster's
    account: str | None = None  # that is charged
    qos: str | None = None  # quality of service, with its limits and priority
    constraint: str | None = None  # features of the nodes, such as a100&nvlink
    reservation: str | None = None  # whose nodes are taken
    mail_user: str | None = None  # who is written to
    mail_type: str | None = None  # about what, such as END,FAIL,REQUEUE; default with mail_user: END,FAIL
    job_name: str | None = None  # default: the recipe's name
    log: str | None = None  # with SLURM's patterns; default: slurm-%j.log in the run directory (%A_%a of an array)
    extra: list[str] = field(default_factory=list)  # further options of sbatch, such as --exclude=n13
    srun_extra: list[str] = field(default_factory=list)  # further options of srun, such as --mpi=none
    seeds: list[int] = field(default_factory=list)  # a job of an array for each, in OUTPUT_DIR/seed-S
    seeds_at_once: int | None = None  # so many of them run at a time; default: all
    # What runs in it.
    launcher: Launcher = Launcher.torchrun  # of the ranks
    python: str | None = None  # default: the one that submits; in a container `python`
    setup: list[str] = field(default_factory=list)  # lines of shell before it: module load, source, export
    container_image: str | None = None  # of srun --container-image (the pyxis plugin)
    container_mounts: list[str] = field(default_factory=list)  # FROM:TO; default: the working directory
    container_command: str | None = None  # or words before python, such as apptainer exec --nv image.sif
    # How it ends and goes on.
    signal_seconds: int = 300  # before the time limit ranks are asked for a checkpoint
    requeue: bool = True  # go on in the queue after a time limit, a preemption or the loss of a node
    max_requeues: int = 100  # starts after the first, whatever made them necessary
    max_restarts: int = 0  # times torchrun starts all ranks again within the job when one has failed


@dataclass(kw_only=True)
class SubmitOptions:
    """Options of `python -m embedtrain.submit`; all others on its command line are the recipe's."""

    slurm: SlurmConfig = field(default_factory=SlurmConfig)  # the job


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
    for option in fields(options):
        values = getattr(options, option.name)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str) and re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value):
                raise ConfigError(f"slurm.{option.name}={value!r}: one line each, without control characters")


def _seconds(time: str | None) -> int | None:
    """A time limit in seconds; None: there is none, or it is no time."""
    found = None if time is None else _TIMES.fullmatch(time)
    if found is None:
        return None
    return sum(int(number) * _SECONDS[unit] for unit, number in found.groupdict().items() if number is not None)


_ASKS_FOR_HELP = ("--help", "-h")
_ARE_TEXT = [field.name for field in fields(SlurmConfig) if field.type == str | None]
_ARE_LINES = [field.name for field in fields(SlurmConfig) if field.type == list[str]]
_HAS_QUOTES = re.compile(r"""(['"]).*\1""", re.DOTALL)
_NOTHING = ("", "null", "~", "Null", "NULL")


@dataclass(frozen=True)
class Submission:
    """What is to be submitted: one training, or one for each seed.

    Attributes:
        recipe: checked; of an array that of no seed in particular.
        slurm: checked.
        arguments: of `python -m embedtrain`, as they were given.
        output_dirs: one for each seed, in their order; one where there are none.
    """

    recipe: Recipe
    slurm: SlurmConfig
    arguments: list[str]
    output_dirs: list[str]


def compose_submit(arguments: list[str]) -> Submission:
    """What is to be submitted.

    Raises:
        ConfigError: as `compose_recipes`; or options under `slurm.` that cannot work.
        SystemExit: after `--help` and its like.
    """
    own = [argument for argument in arguments if _is_own(argument)]
    of_training = [argument for argument in arguments if not _is_own(argument)]
    for argument in of_training:
        if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", argument):
            raise ConfigError(f"{argument!r}: a line end cannot stand in a job's script; write it into a recipe file")
    own = [*_of_cluster(own), *own]
    options = compose_command("submit", SubmitOptions, [_quoted(argument) for argument in own])
    slurm = check_slurm(options.slurm)
    recipe = _composed(of_training)
    if not slurm.seeds:
        return Submission(recipe, slurm, of_training, [recipe.output_dir])
    if given := next((argument for argument in of_training if argument.lstrip("+").startswith("seed=")), None):
        raise ConfigError(f"{given} and slurm.seeds={slurm.seeds} both choose seeds: keep one")
    output_dirs = [_composed([*of_training, f"seed={seed}"]).output_dir for seed in slurm.seeds]
    if len(set(output_dirs)) < len(output_dirs):
        output_dirs = [f"{recipe.output_dir}/seed-{seed}" for seed in slurm.seeds]
    return Submission(recipe, slurm, of_training, output_dirs)


def _composed(arguments: Sequence[str]) -> Recipe:
    recipe = check_recipe(apply_accelerate_config(to_recipe(compose_training(list(arguments)))))
    check_run(recipe)
    return recipe


def _is_own(argument: str) -> bool:
    return argument.lstrip("+~").partition("=")[0].split(".")[0] == "slurm" or argument in _ASKS_FOR_HELP


def _quoted(argument: str) -> str:
    """A text, and each line of a list, in quotes: `&`, `=` and others in them mean something to Hydra."""
    key, sign, value = argument.partition("=")
    name = key.lstrip("+").removeprefix("slurm.")
    if not sign or _HAS_QUOTES.fullmatch(value) or value in _NOTHING:
        return argument
    if name in _ARE_TEXT:
        return f"{key}={_in_quotes(value)}"
    if name not in _ARE_LINES:
        return argument
    if not value.startswith("["):
        return f"{key}=[{_in_quotes(value)}]"
    inner = value[1:-1]
    if not inner.strip() or not value.endswith("]") or re.search(r"""["']""", inner):
        return argument
    return f"{key}=[{','.join(_in_quotes(line.strip()) for line in inner.split(','))}]"


def _in_quotes(text: str) -> str:
    # Hydra takes a backslash for itself only before a quote, and at the end of a text; ${HOME} is the shell's.
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text)
    return '"' + escaped.replace("${", "\\${") + '"'


def _of_cluster(own: Sequence[str]) -> list[str]:
    """The options in the file that `slurm.cluster` names, as arguments."""
    named = [argument.partition("=")[2] for argument in own if argument.lstrip("+").startswith("slurm.cluster=")]
    if not named or named[-1] in _NOTHING:
        return []
    path = Path(named[-1].strip("'\"")).expanduser()
    try:
        # Its scalars as they are written: YAML takes 24:00:00 for a number.
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506  (makes text alone)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"slurm.cluster={path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"slurm.cluster={path}: lines such as `partition: gpu` are expected")
    allowed = [field.name for field in fields(SlurmConfig) if field.name not in ("cluster", "dry_run")]
    arguments = []
    for name, value in found.items():
        if name not in allowed:
            raise ConfigError(f"slurm.cluster={path}: {unknown_option(name, name, allowed)}")
        if isinstance(value, dict) or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
            raise ConfigError(f"slurm.cluster={path}: {name} is a single value, or a list of them")
        if isinstance(value, list):
            each = [_in_quotes(one) if name in _ARE_LINES else one for one in value]
            arguments.append(f"slurm.{name}=[{','.join(each)}]")
        else:
            arguments.append(f"slurm.{name}={value or 'null'}")
    return arguments
