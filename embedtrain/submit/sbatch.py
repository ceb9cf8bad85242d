"""Keeping a script in the run directory, and handing it to sbatch."""

import getpass
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embedtrain.config.recipe import Recipe
from embedtrain.distributed.srun import call
from embedtrain.errors import ConfigError, LaunchError
from embedtrain.submit.script import sbatch_variable

# Jobs that were submitted for a run directory, one JSON object a line.
_SUBMITTED = "submitted.jsonl"
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")  # say where the cluster is; all else is of the job that submits, if it is one


@dataclass(frozen=True)
class Job:
    """A job that was submitted.

    Attributes:
        id: its number; of an array that of all.
        ignored: variables of the environment that would have overruled the script.
    """

    id: str
    ignored: list[str]


def keep(directory: Path, text: str) -> Path:
    """Write the script into the run directory; what lies there may have been edited, so it is never overwritten.

    Returns:
        `submit.sbatch`, or `submit-2.sbatch`, ...; an earlier one if it is the same.

    Raises:
        LaunchError: the directory cannot be written.
    """
    number = 1
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while True:
            path = directory / ("submit.sbatch" if number == 1 else f"submit-{number}.sbatch")
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                if path.read_text(encoding="utf-8", errors="replace") == text:
                    return path
                number += 1
            else:
                path.chmod(0o755)
                return path
    except OSError as error:
        raise LaunchError(f"output_dir={directory} cannot be written: {error.strerror}") from None


def require_sbatch() -> None:
    """Refuse to go on where there is no SLURM.

    Raises:
        LaunchError: sbatch is not found.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "sbatch is not found: submit from a login node of a SLURM cluster, or write slurm.dry_run=true to see the "
            "script"
        )


def require_no_active_job(directory: Path) -> None:
    """Refuse to submit while an earlier job for the same run directory waits or runs: both would want to write there.

    Raises:
        ConfigError: names the job, and what to do.
    """
    states = _states()
    for job in _submitted(directory):
        if job in states:
            raise ConfigError(
                f"job {job} for {directory} is {states[job].lower()} already: wait for it, end it with scancel {job}, "
                "or set another output_dir"
            )


def submit(script: Path, options: Sequence[str], directory: Path, environment: Mapping[str, str] = os.environ) -> Job:
    """Hand the script to sbatch, in the environment of this process.

    Variables named SBATCH_... overrule what stands in a script: those of its own options are left out. So are those
    of a job from within which this is called: they would steer srun in the new one.

    Args:
        script: its path.
        options: names of the options of sbatch that it sets.
        directory: the run directory, where the job is noted.
        environment: of this process.

    Raises:
        LaunchError: sbatch refuses, with what it said.
    """
    overruling = sorted({sbatch_variable(name) for name in options} & set(environment))
    passed = {
        name: value
        for name, value in environment.items()
        if name not in overruling and (name in _KEPT or not name.startswith("SLURM_"))
    }
    answer = call("sbatch", "--parsable", str(script), environment=passed)
    if answer is None:
        raise LaunchError(f"sbatch does not answer; the script is {script}: try again, or sbatch {script} later")
    code, told, complaint = answer
    found = re.search(r"^(\d+)(;|$)", told, re.MULTILINE)
    if code != 0 or found is None:
        lines = [re.sub(r"^sbatch: (error: )?", "", line).strip() for line in (complaint or told).splitlines()]
        said = "; ".join(line for line in lines if line) or f"exit code {code}"
        raise LaunchError(f"sbatch refuses {script}: {said}")
    entry = {"job": found[1], "script": script.name, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    with (directory / _SUBMITTED).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    return Job(found[1], [name for name in overruling if environment[name]])


def _submitted(directory: Path) -> list[str]:
    """Numbers of the jobs that were submitted for a run directory."""
    try:
        lines = (directory / _SUBMITTED).read_text(encoding="utf-8").splitlines()
        return [str(json.loads(line)["job"]) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):  # somebody's own file: nothing can be learnt from it
        return []


def _states() -> dict[str, str]:
    """States of this user's jobs that wait or run, by their numbers; empty where nobody answers."""
    answer = call("squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%F %T")
    rows = [] if answer is None else [line.split() for line in answer[1].splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


_ON_THE_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_IS_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_NOT_LOCAL = re.compile(r"://|[*?\[]")  # URLs; patterns, which may match later


def require_local_paths(recipe: Recipe) -> None:
    """Refuse paths of the recipe that are neither here nor may be names on the Hub.

    Raises:
        ConfigError: names the option and its value.
    """
    named = [("model.path", recipe.model.path), ("model.tokenizer", recipe.model.tokenizer)]
    named += [("data.train", source.path) for source in recipe.data.train]
    named += [("evaluation.sets", each.path) for each in recipe.evaluation.sets]
    for option, path in named:
        if path is not None and not _NOT_LOCAL.search(path) and _must_be_here(path):
            raise ConfigError(f"{option}: {path} is not here ({Path.cwd()}): the job would end as soon as it begins")


def _must_be_here(path: str) -> bool:
    is_name = _ON_THE_HUB.fullmatch(path) and not _IS_FILE.search(path) and not path.startswith(".")
    return not is_name and not Path(path).expanduser().exists()
