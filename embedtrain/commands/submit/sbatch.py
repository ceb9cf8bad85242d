"""Saves a script in the run directory and submits it with sbatch, after checks that fail before the queue does."""

import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embedtrain.commands.submit.options import StartModel
from embedtrain.commands.submit.script import sbatch_variable
from embedtrain.commands.submit.slurm_options import Launcher, SlurmConfig, ranks_per_node
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.srun import call
from embedtrain.errors import ConfigError, LaunchError
from embedtrain.utils.files import expand_user, open_append

# Jobs submitted for a run directory, one JSON object per line.
_SUBMITTED = "submitted.jsonl"
# The cluster's address; all other SLURM_ variables belong to a job that this process may run in.
_INHERITED = ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    id: str  # the number of the job, or of the whole array
    ignored: list[str]  # environment variables that would have overridden the script


def save_script(directory: Path, text: str) -> Path:
    """Write `submit.sbatch`, `submit-2.sbatch`, ... without overwriting an earlier one, which may have been edited.

    Only its owner can read the script, because `slurm.setup` may hold keys; sbatch does not execute the file itself.
    Returns the path; that of an earlier script if it has the same text.
    """
    number = 1
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while True:
            path = directory / ("submit.sbatch" if number == 1 else f"submit-{number}.sbatch")
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                if path.read_text(encoding="utf-8", errors="replace") == text:
                    return path
                number += 1
            else:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                return path
    except OSError as error:
        raise LaunchError(f"output_dir={directory} cannot be written: {error.strerror}") from None


def require_sbatch() -> None:
    """Reject machines without SLURM."""
    if shutil.which("sbatch") is None:
        do = "submit from a login node of a SLURM cluster, or write slurm.dry_run=true to see the script"
        raise LaunchError(f"sbatch is not found: {do}")


@dataclass(frozen=True)
class PartitionLimits:
    """What sinfo reports of the partition that a job would run in."""

    name: str
    cpus_per_node: int | None  # beside the requested GPUs: their share of the CPUs of a node, the smallest of all nodes
    time: str  # the limit of a job that asks for none


def partition_limits(slurm: SlurmConfig) -> PartitionLimits | None:
    """The limits of the job's partition; None if SLURM does not answer, or has no such partition."""
    answer = call("sinfo", "--noheader", "--Node", "--format=%P|%c|%G|%L|%l")
    rows = [] if answer is None else [line.strip().split("|") for line in answer[1].splitlines()]
    nodes = [row for row in rows if len(row) == 5 and _is_chosen(row[0], slurm.partition)]
    if not nodes:
        return None
    name, default_time, time_limit = nodes[0][0].rstrip("*"), nodes[0][3], nodes[0][4]
    gpu_counts = [sum(map(int, re.findall(r"gpu(?::[^:,()]+)?:(\d+)", row[2]))) for row in nodes]
    shares = [
        int(row[1].rstrip("+")) * slurm.gpus_per_node // gpus
        for row, gpus in zip(nodes, gpu_counts, strict=True)
        if gpus >= slurm.gpus_per_node > 0 and row[1].rstrip("+").isdecimal()
    ]
    cpus = min(shares, default=0)
    if slurm.launcher is Launcher.srun:
        cpus -= cpus % ranks_per_node(slurm)
    return PartitionLimits(name, cpus or None, default_time if default_time not in ("n/a", "") else time_limit)


def _is_chosen(partition: str, chosen: str | None) -> bool:
    return partition.endswith("*") if chosen is None else partition.rstrip("*") in chosen.split(",")


def require_no_active_job(directory: Path) -> None:
    """Reject a run directory with a pending or running job: both would write there."""
    states = _job_states()
    for job in _submitted_jobs(directory):
        if job in states:
            raise ConfigError(
                f"job {job} for {directory} is already {states[job].lower()}: wait for it, end it with scancel {job}, "
                "or set another output_dir"
            )


def submit(script: Path, options: Sequence[str], directory: Path, environment: Mapping[str, str] = os.environ) -> Job:
    """Submit the script with sbatch.

    The job inherits `environment` without SBATCH_ variables that override options of the script, and without SLURM_
    variables of a job that this process runs in, which would affect srun. The job is recorded in `directory`.

    Args:
        options: names of the sbatch options that the script sets.
    """
    overriding = sorted({sbatch_variable(name) for name in options} & set(environment))
    inherited = {
        name: value
        for name, value in environment.items()
        if name not in overriding and (name in _INHERITED or not name.startswith("SLURM_"))
    }
    answer = call("sbatch", "--parsable", str(script), environment=inherited)
    if answer is None:
        raise LaunchError(f"sbatch does not answer; the script is {script}: try again, or sbatch {script} later")
    code, output, errors = answer
    job = re.search(r"^(\d+)(;|$)", output, re.MULTILINE)
    if code != 0 or job is None:
        lines = [re.sub(r"^sbatch: (error: )?", "", line).strip() for line in (errors or output).splitlines()]
        reason = "; ".join(line for line in lines if line) or f"exit code {code}"
        raise LaunchError(f"sbatch rejects {script}: {reason}")
    entry = {"job": job[1], "script": script.name, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    with open_append(directory / _SUBMITTED) as file:
        file.write((json.dumps(entry) + "\n").encode())
    return Job(job[1], [name for name in overriding if environment[name]])


def _submitted_jobs(directory: Path) -> list[str]:
    """Ids of the jobs submitted for a run directory."""
    try:
        lines = (directory / _SUBMITTED).read_text(encoding="utf-8").splitlines()
        return [str(json.loads(line)["job"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError):  # no such file, or not written by submit
        return []


def _job_states() -> dict[str, str]:
    """States of this user's pending and running jobs by id; empty if SLURM does not answer."""
    answer = call("squeue", "--noheader", f"--user={os.getuid()}", "--format=%F %T")
    rows = [] if answer is None else [line.split() for line in answer[1].splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_FILE_NAME = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_OFFLINE = re.compile(r"\b(?:HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE)=[\"']?(\w*)")
_NOT_LOCAL = re.compile(r"://|[*?\[]")  # URLs and patterns


def require_local_paths(recipe: Recipe) -> None:
    """Reject paths of the recipe that do not exist and cannot be Hub ids, before the job waits in a queue for hours."""
    paths = [("model.path", recipe.model.path), ("model.tokenizer", recipe.model.tokenizer)]
    paths += [("data.train", source.path) for source in recipe.data.train]
    paths += [("evaluation.sets", eval_set.path) for eval_set in recipe.evaluation.sets]
    for option, path in paths:
        if path is not None and not _NOT_LOCAL.search(path) and _is_missing(path):
            raise ConfigError(f"{option}: {path} does not exist in {Path.cwd()}: the job would fail at its start")


def _is_missing(path: str) -> bool:
    is_hub_id = _HUB_ID.fullmatch(path) and not _FILE_NAME.search(path) and not path.startswith(".")
    return not is_hub_id and not expand_user(path).exists()


def models_to_download(models: Sequence[StartModel], setup: Sequence[str]) -> list[str]:
    """Notes on models that the job downloads; a ConfigError if one is not in the cache and the job is offline.

    The job has the environment of this process, and then runs the lines of `setup`.
    """
    notes = []
    for model in models:
        if expand_user(model.path).exists() or not _HUB_ID.fullmatch(model.path) or _is_cached(model):
            continue
        missing = f"{model.option}={model.path} is not in the cache of the Hugging Face Hub"
        if _is_offline(setup):
            raise ConfigError(
                f"{missing}, and the job is offline (HF_HUB_OFFLINE): download it first, hf download {model.path}, or "
                "write a directory"
            )
        notes.append(f"{missing}: the job downloads it, if its nodes reach the Hub")
    return notes


def _is_offline(setup: Sequence[str]) -> bool:
    from huggingface_hub import is_offline_mode

    lines = [match for line in setup for match in _OFFLINE.findall(line)]
    return is_offline_mode() if not lines else lines[-1].upper() in ("1", "ON", "YES", "TRUE")


def _is_cached(model: StartModel) -> bool:
    from huggingface_hub import try_to_load_from_cache

    found = (
        try_to_load_from_cache(model.path, name, revision=model.revision) for name in ("config.json", "modules.json")
    )
    return any(isinstance(path, str) for path in found)
