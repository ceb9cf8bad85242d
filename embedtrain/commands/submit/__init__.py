"""`python -m embedtrain submit recipe=NAME slurm.nodes=4 slurm.gpus_per_node=8`: run a command on a cluster."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from embedtrain.commands.submit.kubernetes import check_results_are_kept, check_train_job, render_job, render_train_job
from embedtrain.commands.submit.options import (
    SlurmConfig,
    Submission,
    SubmitOptions,
    Target,
    compose_submit,
    has_paths_of_this_machine,
    ranks_per_node,
)
from embedtrain.commands.submit.sbatch import (
    PartitionLimits,
    directives,
    models_to_download,
    partition_limits,
    render_script,
    require_local_paths,
    require_no_active_job,
    require_sbatch,
    save_script,
    submit,
)
from embedtrain.errors import ConfigError

__all__ = ["SubmitOptions", "compose", "require_paths", "run"]

Command = list[str]


def compose(arguments: list[str]) -> tuple[Submission, Command]:
    """The job, and the command line that asks for it."""
    return compose_submit(arguments), ["python", "-m", "embedtrain", "submit", *arguments]


def require_paths(options: tuple[Submission, Command]) -> None:
    """Check the paths of a command other than training as it does, if they exist now and on this machine."""
    submission, _ = options
    if not submission.is_training and has_paths_of_this_machine(submission.job):
        submission.command.require_paths(submission.command.compose(submission.arguments))


def run(options: tuple[Submission, Command]) -> None:
    """Submit the job to SLURM, or print what Kubernetes needs."""
    submission, command_line = options
    if submission.job.to is Target.slurm:
        _submit_to_slurm(submission, command_line)
        return
    if submission.job.to is Target.kubeflow:
        check_train_job(submission.job.kubernetes)
    for output_dir in submission.output_dirs:
        check_results_are_kept(submission.job.kubernetes, output_dir)
    render = render_job if submission.job.to is Target.kubernetes else render_train_job
    print(render(submission.command, submission.arguments, submission.name, submission.job.kubernetes), end="")
    for line in _kubernetes_notes(submission):
        print(f"note: {line}", file=sys.stderr)


def _submit_to_slurm(submission: Submission, command_line: Command) -> None:
    """Write the script into the run directory, submit it with sbatch, and print how to follow the job."""
    slurm = submission.job.slurm
    has_container = slurm.container_image is not None or slurm.container_command is not None
    if submission.recipe is not None and has_paths_of_this_machine(submission.job):
        require_local_paths(submission.recipe)
    notes: list[str] = []
    if has_paths_of_this_machine(submission.job):
        notes += models_to_download(submission.models, slurm.setup)
    limits = partition_limits(slurm)
    if slurm.cpus_per_node is None and not slurm.exclusive and limits is not None and limits.cpus_per_node:
        slurm = replace(slurm, cpus_per_node=limits.cpus_per_node)
        submission = replace(submission, job=replace(submission.job, slurm=slurm))
        notes.append(f"slurm.cpus_per_node={slurm.cpus_per_node}: the GPUs' share of a node of partition {limits.name}")
    notes += _left_open(slurm, limits)
    directory = submission.directory
    workdir = _working_directory()
    default_log = f"{str(directory).replace('%', '%%')}/slurm-{'%A_%a' if slurm.seeds else '%j'}.log"
    log = slurm.log or default_log
    python = slurm.python or ("python" if has_container else sys.executable)
    text = render_script(submission, command_line=command_line, workdir=workdir, log=log, python=python)
    if slurm.dry_run:
        print(text, end="")
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return
    require_sbatch()
    require_no_active_job(directory)
    script = save_script(directory, text)
    if slurm.log is not None:
        Path(slurm.log.rpartition("/")[0] or ".").mkdir(parents=True, exist_ok=True)
    option_names = [name for name, _ in directives(submission.name, slurm, workdir, log)]
    job = submit(script, option_names, directory)
    seeds = f", {len(slurm.seeds)} seeds" if slurm.seeds else ""
    log_path = log.replace("%%", "%").replace("%j", job.id).replace("%A", job.id).replace("%a", "0")
    print(f"job {job.id}: {submission.name} on {slurm.nodes} x {ranks_per_node(slurm)} ranks{seeds}")
    print(f"  script   {script}")
    print(f"  queue    squeue --jobs {job.id}")
    print(f"  log      tail -F {log_path}{'   (_1, _2, ... for the other seeds)' if slurm.seeds else ''}")
    after = "after a checkpoint; scancel {0} immediately" if submission.is_training else "immediately"
    signal = "--signal=TERM " if submission.is_training else ""
    print(f"  stop     scancel {signal}{job.id}   {after.format(job.id)}")
    ignored = [f"{name} in the environment is ignored: the script sets this option" for name in job.ignored]
    for note in (*ignored, *notes):
        print(f"  note     {note}")


def _working_directory() -> str:
    """As the shell shows it: the nodes may have the path with its symbolic links, but not the resolved one."""
    logical = os.environ.get("PWD", "")
    is_current = os.path.isabs(logical) and Path(logical).resolve() == Path.cwd().resolve()
    directory = logical if is_current else os.getcwd()
    if any(ord(letter) < 32 or letter == "\\" for letter in directory):
        raise ConfigError(
            f"the working directory {directory!r} has control characters or backslashes, which a job's script cannot "
            "hold: use another directory"
        )
    return directory


def _left_open(slurm: SlurmConfig, limits: PartitionLimits | None) -> list[str]:
    """What the job leaves to the defaults of the cluster."""
    notes = []
    if slurm.cpus_per_node is None and not slurm.exclusive:
        notes.append("slurm.cpus_per_node is not set, so the cluster's default applies, often one core per task")
    if slurm.time is None:
        limit = "the partition's limit" if limits is None else f"the limit of partition {limits.name}, {limits.time},"
        requeued = "; the job is requeued and resumes after it" if slurm.requeue else ""
        notes.append(f"slurm.time is not set, so {limit} applies{requeued}; shorter jobs start sooner")
    if slurm.mem is None and not slurm.exclusive:
        notes.append("slurm.mem is not set, so the cluster's default applies, often an amount per CPU; 0 means all")
    return notes


def _kubernetes_notes(submission: Submission) -> list[str]:
    config = submission.job.kubernetes
    open_options = [f"kubernetes.{name}" for name in ("cpus_per_node", "mem") if getattr(config, name) is None]
    notes = ["kubectl apply -f FILE starts it; kubectl delete -f FILE stops it after a checkpoint, and deletes it"]
    if open_options:
        notes.append(f"{' and '.join(open_options)} left open: the namespace's defaults apply")
    return notes
