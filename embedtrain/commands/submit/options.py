"""Options of `python -m embedtrain submit`: those of the job, and the command line of the command that it runs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from embedtrain.commands.submit.kubernetes import KubernetesConfig, check_kubernetes
from embedtrain.commands.submit.slurm_options import SlurmConfig, check_slurm, has_control_characters, read_cluster
from embedtrain.config.accelerate import apply_accelerate_config
from embedtrain.config.arguments import option_of, quote
from embedtrain.config.checks import check_recipe
from embedtrain.config.command_line import asks_for_help
from embedtrain.config.commands import COMMANDS, WRITING, Command, find_command
from embedtrain.config.compose import compose_command, compose_recipe
from embedtrain.config.recipe import Recipe
from embedtrain.config.validation import did_you_mean, require_single_process, written
from embedtrain.errors import ConfigError
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.types import Pipeline

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
    for option, text in names.items():
        if re.search(r"[\x00-\x1f\x7f\\']", text) is not None:
            raise ConfigError(
                f"{option}={written(text)}: cannot have line ends, backslashes or quotes in a job's script"
            )


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
