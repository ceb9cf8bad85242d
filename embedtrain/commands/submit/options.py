"""Options of `python -m embedtrain submit`: those of the job, and the command line of the command that it runs."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from embedtrain.commands.submit.kubernetes import KubernetesConfig, check_kubernetes
from embedtrain.config.accelerate import apply_accelerate_config
from embedtrain.config.checks import check_recipe
from embedtrain.config.command_line import asks_for_help, option_of, quote
from embedtrain.config.command_options import NodeOptions
from embedtrain.config.commands import COMMANDS, WRITING, Command, find_command
from embedtrain.config.compose import compose_command, compose_recipe
from embedtrain.config.hydra_files import load_yaml
from embedtrain.config.options import option
from embedtrain.config.recipe import Recipe
from embedtrain.config.validation import OptionChecks, did_you_mean, require_single_process, unknown_option, written
from embedtrain.errors import ConfigError
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.types import Pipeline
from embedtrain.utils.files import expand_user

_MAX_SIGNAL_SECONDS = 65535  # sbatch takes no more


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
    seeds_at_once: int | None = option(None, at_least=1)  # that run at the same time; default: all
    launcher: Launcher = Launcher.torchrun  # of the ranks
    python: str | None = None  # default: the interpreter that submits; in a container `python`
    setup: list[str] = field(default_factory=list)  # shell commands before it: module load, source, export
    container_image: str | None = None  # of srun --container-image (the pyxis plugin)
    container_mounts: list[str] = field(default_factory=list)  # FROM:TO; default: the working directory
    container_command: str | None = None  # or a command before python, such as apptainer exec --nv image.sif
    doctor: bool = False  # check all nodes first; a problem ends the job before the command starts
    # before the time limit, the ranks are asked for a checkpoint
    signal_seconds: int = option(300, within=(1, _MAX_SIGNAL_SECONDS))
    requeue: bool = True  # after a time limit, a preemption or the loss of a node
    max_requeues: int = option(100, at_least=0)  # starts after the first, for any reason
    max_restarts: int = option(0, at_least=0)  # restarts of all ranks by torchrun within the job after one has failed


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
    for each in fields(slurm):
        value = getattr(slurm, each.name)
        is_safe = not any(map(has_control_characters, value if isinstance(value, list) else [value]))
        check.require(is_safe, each.name, "one line each, without control characters")
    gpu_options = [name for name in ("gres", "gpu_type") if getattr(slurm, name) is not None]
    check.require(len(gpu_options) < 2, "gres", f"gpu_type={slurm.gpu_type} names GPUs as well; keep one")
    has_gpus = slurm.gpus_per_node > 0 or not gpu_options
    check.require(has_gpus, "gpus_per_node", f"{''.join(gpu_options)} asks for GPUs; write how many")
    ranks = ranks_per_node(slurm)
    if slurm.launcher is Launcher.srun:
        message = f"must be a multiple of the {ranks} ranks of a node with launcher=srun"
        check.require((slurm.cpus_per_node or 0) % ranks == 0, "cpus_per_node", message)
        check.require(slurm.max_restarts == 0, "max_restarts", "is for launcher=torchrun")
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


HELP = """embedtrain submit: a training or another command as a job of a cluster

  embedtrain submit recipe=NAME slurm.nodes=4 [any option of training]
      also recipe=pipelines/NAME
  embedtrain submit mine [options of it] [slurm.X=value ...]
      also any other command that writes an output_dir
  embedtrain submit recipe=NAME slurm.dry_run=true     print the script only
  embedtrain submit recipe=NAME to=kubernetes kubernetes.image=IMAGE ...

{options: to slurm.nodes slurm.gpus_per_node slurm.time slurm.partition slurm.account slurm.setup
  slurm.launcher slurm.max_restarts slurm.dry_run kubernetes.image kubernetes.volumes}

A SLURM job saves checkpoints and requeues itself. Its script stays in the run's
directory. to=kubernetes and to=kubeflow print manifests for kubectl apply.
Other options are those of the command: `embedtrain train --help`."""


class Target(str, Enum):
    """What runs the job."""

    slurm = "slurm"
    kubernetes = "kubernetes"  # an indexed Job
    kubeflow = "kubeflow"  # a TrainJob of the Kubeflow Trainer


@dataclass(kw_only=True)
class SubmitOptions:
    """Options of `python -m embedtrain submit`; all others on its command line belong to the command."""

    to: Target = Target.slurm  # what runs the job: slurm | kubernetes | kubeflow
    slurm: SlurmConfig = field(default_factory=SlurmConfig)  # the job of SLURM
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)  # the job of Kubernetes or Kubeflow


@dataclass(frozen=True)
class StartModel:
    """A model that a job opens: a directory or an id of the Hub."""

    option: str
    path: str
    revision: str | None

    @classmethod
    def of(cls, options: Any, prefix: str = "") -> "tuple[StartModel, ...]":
        """That of the options of a command, or of a training; none if it starts without one."""
        if isinstance(options, Recipe):
            option, path, revision = "model.path", options.model.path, options.model.revision
        else:
            option, path, revision = "model", getattr(options, "model", None), getattr(options, "revision", None)
        return (cls(f"{prefix}{option}", path, revision),) if path else ()


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job: one command, or one training for each seed."""

    command: Command
    arguments: list[str]  # its command line
    name: str
    output_dirs: list[str]  # of the results, one for each seed; a single one without seeds
    uploads: bool = False  # whether its end uploads a model
    recipe: Recipe | None = None  # of a training, without the seeds of an array; None for a pipeline
    models: tuple["StartModel", ...] = ()  # that it opens, as far as they exist before it
    job: SubmitOptions = field(default_factory=SubmitOptions)

    @property
    def is_training(self) -> bool:
        """Whether it is a training or a pipeline: stopped by a signal, it writes `stopped.json` and resumes."""
        return self.command.saves_on_signal

    @property
    def directory(self) -> Path:
        """Of the script and the log: the run directory, or a neighbour of what other commands write."""
        first = Path(self.output_dirs[0])
        if not self.is_training:  # an export replaces its directory
            return first.with_name(f"{first.name}.job")
        # Several seeds: the parent of their run directories.
        parent = None if self.recipe is None else Path(self.recipe.output_dir)
        return first.parent if self.job.slurm.seeds and first.parent == parent else first


def compose_submit(arguments: list[str]) -> Submission:
    """The job to submit, checked. Raises SystemExit after `--help` and `--cfg job`."""
    require_single_process("submit")
    command, arguments = _split_command(arguments)
    job_arguments = [argument for argument in arguments if _is_job_option(argument)]
    command_arguments = [argument for argument in arguments if not _is_job_option(argument)]
    for argument in command_arguments:
        if has_control_characters(argument):
            raise ConfigError(f"{argument!r}: a job's script cannot hold a line end; write it into a recipe file")
    if not command.ranks:  # runs in one process, on the CPU
        job_arguments = ["slurm.gpus_per_node=0", "kubernetes.gpus_per_node=0", *job_arguments]
    job_arguments = [*read_cluster(job_arguments), *job_arguments]
    job = compose_command("submit", SubmitOptions, [_quote_text(argument) for argument in job_arguments], HELP)
    check_slurm(job.slurm)
    check_kubernetes(job.kubernetes, is_used=job.to is not Target.slurm)
    if job.slurm.seeds and (not command.saves_on_signal or job.to is not Target.slurm):
        raise ConfigError(f"slurm.seeds={written(job.slurm.seeds)} is for trainings as SLURM jobs: leave it out")
    if command.saves_on_signal:
        pipeline = compose_pipeline(command_arguments, check_paths=has_paths_of_this_machine(job))
        return _training(command_arguments, job) if pipeline is None else _pipeline(pipeline, command_arguments, job)
    options = command.compose(command_arguments)
    assert command.output is not None
    output_dir = str(getattr(options, command.output) or f"{options.run}/model")  # an export's default
    name = f"{command.label}-{Path(output_dir).name}"
    _check_names(name=name, output_dir=output_dir)
    uploads = any(option_of(argument) == "push_to_hub" for argument in command_arguments)
    return Submission(
        command=command,
        arguments=command_arguments,
        name=name,
        output_dirs=[output_dir],
        uploads=uploads,
        models=StartModel.of(options),
        job=job,
    )


def has_paths_of_this_machine(job: SubmitOptions) -> bool:
    """Whether the paths of the command exist now: not in a container, or if an earlier job writes them."""
    slurm = job.slurm
    has_container = slurm.container_image is not None or slurm.container_command is not None
    waits = any(option.startswith(("--dependency", "-d")) for option in slurm.extra)
    return job.to is Target.slurm and not has_container and not waits


def _split_command(arguments: list[str]) -> tuple[Command, list[str]]:
    """The command that the job runs, `train` unless the first argument names another, and its arguments."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        return COMMANDS["train"], arguments
    command = find_command(arguments[0])
    if command is None or command.output is None:
        hint = did_you_mean(arguments[0], WRITING)
        raise ConfigError(f"submit {arguments[0]}: unknown command{hint} Allowed are {', '.join(WRITING)}")
    return command, arguments[1:]


def _training(arguments: list[str], job: SubmitOptions) -> Submission:
    recipe = _compose_checked(arguments)
    output_dirs = [recipe.output_dir]
    if seeds := job.slurm.seeds:
        if seed := next((argument for argument in arguments if option_of(argument) == "seed"), None):
            raise ConfigError(f"{seed} and slurm.seeds={written(seeds)} both choose seeds: keep one")
        output_dirs = [_compose_checked([*arguments, f"seed={seed}"]).output_dir for seed in seeds]
        if len(set(output_dirs)) < len(output_dirs):
            output_dirs = [f"{recipe.output_dir}/seed-{seed}" for seed in seeds]
    return Submission(
        command=COMMANDS["train"],
        arguments=arguments,
        name=recipe.name,
        output_dirs=output_dirs,
        uploads=recipe.tracking.wandb_artifacts or recipe.export.push_to_hub is not None,
        recipe=recipe,
        models=StartModel.of(recipe),
        job=job,
    )


def _pipeline(pipeline: Pipeline, arguments: list[str], job: SubmitOptions) -> Submission:
    if job.slurm.seeds:
        raise ConfigError(
            f"slurm.seeds={written(job.slurm.seeds)} is for the recipe of one training: `repeat` of a stage trains "
            "several seeds"
        )
    output_dir = str(pipeline.output_dir)
    _check_names(name=pipeline.name, output_dir=output_dir)
    exports = [getattr(stage.options, "export", stage.options) for stage in pipeline.stages]
    return Submission(
        command=COMMANDS["train"],
        arguments=arguments,
        name=pipeline.name,
        output_dirs=[output_dir],
        uploads=any(getattr(export, "push_to_hub", None) is not None for export in exports),
        models=tuple(
            model
            for stage in pipeline.stages
            for model in StartModel.of(stage.options, f"stages.{stage.name}.")
            if not Path(model.path).is_relative_to(pipeline.output_dir)  # of an earlier stage
        ),
        job=job,
    )


def _compose_checked(arguments: Sequence[str]) -> Recipe:
    recipe = check_recipe(apply_accelerate_config(compose_recipe(arguments)))
    _check_names(name=recipe.name, output_dir=recipe.output_dir)
    return recipe


def _check_names(**names: str) -> None:
    """Reject a name or an output directory that would break the script."""
    for name, text in names.items():
        if re.search(r"[\x00-\x1f\x7f\\']", text) is not None:
            raise ConfigError(f"{name}={written(text)}: cannot have line ends, backslashes or quotes in a job's script")


def _is_job_option(argument: str) -> bool:
    option = option_of(argument)
    return option.split(".")[0] in ("slurm", "kubernetes") or option == "to" or asks_for_help(argument)


_HAS_QUOTES = re.compile(r"""(['"]).*\1""", re.DOTALL)
_NULLS = ("", "null", "~", "Null", "NULL")
_TYPES = {
    f"{group}.{option.name}": option.type
    for group, kind in (("slurm", SlurmConfig), ("kubernetes", KubernetesConfig))
    for option in fields(kind)
}


def _quote_text(argument: str) -> str:
    """A text, and each line of a list, in quotes: Hydra's grammar reserves `&`, `=` and others."""
    key, sign, value = argument.partition("=")
    kind = _TYPES.get(key.lstrip("+"))
    if not sign or _HAS_QUOTES.fullmatch(value) or value in _NULLS:
        return argument
    if kind in (str, str | None):
        return f"{key}={quote(value)}"
    if kind != list[str]:
        return argument
    if not value.startswith("["):
        return f"{key}=[{quote(value)}]"
    inner = value[1:-1]
    if not inner.strip() or not value.endswith("]") or re.search(r"""["']""", inner):
        return argument
    return f"{key}=[{','.join(quote(line.strip()) for line in inner.split(','))}]"
