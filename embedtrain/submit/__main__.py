"""`python -m embedtrain.submit recipe=NAME slurm.nodes=4 slurm.gpus_per_node=8`: train as a SLURM job."""

import os
import sys
from pathlib import Path

from embedtrain.cli import run_command
from embedtrain.errors import ConfigError
from embedtrain.submit.options import SlurmConfig, Submission, compose_submit, ranks_per_node
from embedtrain.submit.sbatch import require_local_paths, require_no_active_job, require_sbatch, save_script, submit
from embedtrain.submit.script import directives, render_script

Command = list[str]


def compose(arguments: list[str]) -> tuple[Submission, Command]:
    """The job, and the command line that asks for it."""
    return compose_submit(arguments), ["python", "-m", "embedtrain.submit", *arguments]


def main(options: tuple[Submission, Command]) -> None:
    """Write the script into the run directory, submit it with sbatch, and print how to follow the job."""
    submission, command = options
    slurm = submission.slurm
    has_container = slurm.container_image is not None or slurm.container_command is not None
    if not has_container:  # in a container, paths are those of the container
        require_local_paths(submission.recipe)
    # The directory of the script: the run directory, or the parent of the seeds' run directories.
    directory, parent = Path(submission.output_dirs[0]), Path(submission.recipe.output_dir)
    if slurm.seeds and directory.parent == parent:
        directory = parent
    workdir = _working_directory()
    default_log = f"{str(directory).replace('%', '%%')}/slurm-{'%A_%a' if slurm.seeds else '%j'}.log"
    log = slurm.log or default_log
    python = slurm.python or ("python" if has_container else sys.executable)
    text = render_script(submission, command=command, workdir=workdir, log=log, python=python)
    if slurm.dry_run:
        print(text, end="")
        return
    require_sbatch()
    require_no_active_job(directory)
    script = save_script(directory, text)
    if slurm.log is not None:
        Path(slurm.log.rpartition("/")[0] or ".").mkdir(parents=True, exist_ok=True)
    option_names = [name for name, _ in directives(submission.recipe, slurm, workdir, log)]
    job = submit(script, option_names, directory)
    seeds = f", {len(slurm.seeds)} seeds" if slurm.seeds else ""
    log_path = log.replace("%%", "%").replace("%j", job.id).replace("%A", job.id).replace("%a", "0")
    print(f"job {job.id}: {submission.recipe.name} on {slurm.nodes} x {ranks_per_node(slurm)} ranks{seeds}")
    print(f"  script   {script}")
    print(f"  queue    squeue --jobs {job.id}")
    print(f"  log      tail -F {log_path}{'   (_1, _2, ... for the other seeds)' if slurm.seeds else ''}")
    print(f"  stop     scancel --signal=TERM {job.id}   after a checkpoint; scancel {job.id}   immediately")
    for line in _notes(slurm, job.ignored):
        print(f"  note     {line}")


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


def _notes(slurm: SlurmConfig, ignored: list[str]) -> list[str]:
    notes = [f"{name} in the environment is ignored: the script sets this option" for name in ignored]
    if slurm.cpus_per_node is None and not slurm.exclusive:
        notes.append("slurm.cpus_per_node is not set, so the cluster's default applies, often one core per task")
    if slurm.time is None:
        notes.append("slurm.time is not set, so the partition's limit applies; shorter jobs start sooner")
    return notes


if __name__ == "__main__":
    run_command(compose, main, has_ranks=False)
