"""`python -m embedtrain.submit recipe=NAME slurm.nodes=4 slurm.gpus_per_node=8`: a training as a SLURM job."""

import os
import sys
from pathlib import Path

from embedtrain.cli import run_command
from embedtrain.errors import ConfigError
from embedtrain.submit.options import SlurmConfig, Submission, compose_submit, ranks_per_node
from embedtrain.submit.sbatch import keep, require_local_paths, require_no_active_job, require_sbatch, submit
from embedtrain.submit.script import directives, render_script


def read(arguments: list[str]) -> tuple[Submission, list[str]]:
    """The job, and the command that asks for it."""
    return compose_submit(arguments), ["python", "-m", "embedtrain.submit", *arguments]


def act(asked: tuple[Submission, list[str]]) -> None:
    """Write the script into the run directory, hand it to sbatch, and tell how the job is followed."""
    submission, command = asked
    slurm = submission.slurm
    if slurm.container_image is None and slurm.container_command is None:  # else paths are those of the container
        require_local_paths(submission.recipe)
    directory = _directory(submission)
    workdir = _working_directory()
    own = f"{str(directory).replace('%', '%%')}/slurm-{'%A_%a' if slurm.seeds else '%j'}.log"
    log = slurm.log or own
    python = slurm.python or ("python" if slurm.container_image or slurm.container_command else sys.executable)
    text = render_script(submission, command=command, workdir=workdir, log=log, python=python)
    if slurm.dry_run:
        print(text, end="")
        return
    require_sbatch()
    require_no_active_job(directory)
    script = keep(directory, text)
    if slurm.log is not None:
        Path(slurm.log.rpartition("/")[0] or ".").mkdir(parents=True, exist_ok=True)
    options = [name for name, _ in directives(submission.recipe, slurm, workdir, log)]
    job = submit(script, options, directory)
    jobs = f", {len(slurm.seeds)} seeds" if slurm.seeds else ""
    number = job.id if slurm.seeds else None
    shown = log.replace("%%", "%").replace("%j", job.id).replace("%A", job.id).replace("%a", "0")
    each = ranks_per_node(slurm)
    print(f"job {job.id}: {submission.recipe.name} on {slurm.nodes} x {each} ranks{jobs}")
    print(f"  script   {script}")
    print(f"  queue    squeue --jobs {job.id}")
    print(f"  log      tail -F {shown}{'   (_1, _2, ... of the other seeds)' if number else ''}")
    print(f"  stop     scancel --signal=TERM {job.id}   after a checkpoint; scancel {job.id}   at once")
    for line in _notes(slurm, job.ignored):
        print(f"  note     {line}")


def _directory(submission: Submission) -> Path:
    """Where the script is kept: the run directory, or the one above those of the seeds."""
    first = Path(submission.output_dirs[0])
    above = Path(submission.recipe.output_dir)
    return above if submission.slurm.seeds and first.parent == above else first


def _working_directory() -> str:
    """As the user sees it: a path through a link may be the one that nodes have as well."""
    shown = os.environ.get("PWD", "")
    here = shown if shown and os.path.isabs(shown) and Path(shown).resolve() == Path.cwd().resolve() else os.getcwd()
    if any(ord(letter) < 32 or letter == "\\" for letter in here):
        raise ConfigError(f"the working directory {here!r} cannot stand in a job's script: use one without such signs")
    return here


def _notes(slurm: SlurmConfig, ignored: list[str]) -> list[str]:
    notes = [f"{name} in the environment is left out: the script's own option holds" for name in ignored]
    if slurm.cpus_per_node is None and not slurm.exclusive:
        notes.append("slurm.cpus_per_node is not set, so the cluster's default holds, often one core a node's task")
    if slurm.time is None:
        notes.append("slurm.time is not set, so the partition's limit holds; shorter jobs start sooner")
    return notes


if __name__ == "__main__":
    run_command(read, act, has_ranks=False)
