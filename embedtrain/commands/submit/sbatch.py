"""The script of a SLURM job, in the run directory, and its submission after checks that fail before the queue does."""

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embedtrain import __version__
from embedtrain.commands.submit.options import Launcher, SlurmConfig, StartModel, Submission, ranks_per_node
from embedtrain.config.command_line import option_of
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.srun import call
from embedtrain.errors import ConfigError, LaunchError
from embedtrain.utils.files import expand_user, open_append
from embedtrain.utils.formatting import format_count

# First in the script: a signal may arrive while modules are being loaded.
PROLOGUE = """\

set -eo pipefail
job=$SLURM_JOB_ID  # in an array ARRAY_TASK: the id of its last job means the whole array
if [[ -n ${{SLURM_ARRAY_JOB_ID:-}} ]]; then job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
restarts=${{SLURM_RESTART_COUNT:-0}}
max_requeues={max_requeues}
ranks=  # the process of srun, once it runs

# ---- signals. SLURM sends this shell USR1 before the time limit (--signal above), and on some clusters before a
# preemption; TERM is sent by scancel, and on other clusters before a preemption. The ranks are asked for a checkpoint,
# and this shell waits for them: if it ended, SLURM would end them too.
asked=
# shellcheck disable=SC2329  # the trap calls it
forward() {{
  asked=USR1
  echo "submit: SLURM wants the nodes back; the ranks are asked for a checkpoint"
  if [[ -n $ranks ]]; then scancel --signal=USR1 "$job" || true; fi
}}
trap forward USR1
trap 'asked=${{asked:-TERM}}' TERM

# ---- requeueing. The job goes back into the queue under the same id, and its next start resumes from the newest
# checkpoint.
again() {{
  local state
  state=$(squeue --noheader --jobs="$job" --format=%T 2>/dev/null || true)
  if [[ ${{state:-RUNNING}} != RUNNING ]]; then
    echo "submit: $1; the job is $state, so SLURM decides what happens next"
  elif (( restarts >= max_requeues )); then
    echo "submit: $1; it has been requeued $restarts times and is not requeued again (slurm.max_requeues)"
  elif scontrol requeue "$job"; then
    echo "submit: $1; the job is requeued"
  else
    echo "submit: $1; the job cannot be requeued: submit this script again to resume"
  fi
  exit 75
}}
if (( restarts > max_requeues )); then
  echo "submit: this is start $((restarts + 1)), and slurm.max_requeues=$max_requeues allows no more"
  exit 1
fi

"""

EPILOGUE = """\
ranks=$!

# ---- how the ranks ended. A signal to this shell ends `wait`, not the ranks.
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks" || true; done
status=0
wait "$ranks" || status=$?
if (( status == 0 )); then
  echo "submit: done"
  exit 0
fi
stopped=$(cat "$run_dir/stopped.json" 2>/dev/null || true)
echo "submit: the ranks ended with $status${stopped:+, after a checkpoint: $stopped}"
preempted=$(scontrol show job "$job" 2>/dev/null | sed -n 's/.*PreemptTime=\\([0-9][^ ]*\\).*/\\1/p' || true)
if [[ $asked == USR1 ]]; then again "it was asked to stop"; fi
if [[ -n $preempted ]]; then again "it is preempted"; fi
if [[ $asked == TERM ]]; then again "SLURM ends it"; fi
if [[ -n $stopped ]]; then
  echo "submit: somebody asked the ranks to stop, so it is not requeued; submit this script again to resume"
  exit 75
fi

# An error. A lost node looks like one to the other nodes, and SLURM notices it later than they do: an empty step on
# every node finds it. If even the first node does not run a step, the cause is unknown.
if (( SLURM_JOB_NUM_NODES > 1 )) &&
  ! timeout 90 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 true &&
  timeout 90 srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" true; then
  again "a node does not answer"
fi
exit "$status"
"""

_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
# Options whose variable is not called SBATCH_OPTION.
_VARIABLES = {"time": "SBATCH_TIMELIMIT", "array": "SBATCH_ARRAY_INX", "mem": "SBATCH_MEM_PER_NODE"}


def directives(name: str, options: SlurmConfig, workdir: str, log: str) -> list[tuple[str, str | None]]:
    """Options of sbatch and their values, in the order of the script; None: an option without a value.

    Args:
        name: of the job, unless the options have one.
        workdir: absolute path of the directory that the job starts in.
        log: the file that the job writes, with SLURM's patterns.
    """
    tasks = ranks_per_node(options) if options.launcher is Launcher.srun else 1
    cpus_per_task = None if options.cpus_per_node is None else options.cpus_per_node // tasks
    gpus = None
    if options.gpus_per_node and options.gres is None:
        gpus = f"{options.gpu_type}:{options.gpus_per_node}" if options.gpu_type else str(options.gpus_per_node)
    limit = f"%{options.seeds_at_once}" if options.seeds_at_once is not None else ""
    values: list[tuple[str, str | int | bool | None]] = [
        ("job-name", options.job_name or name),
        ("chdir", workdir),
        ("output", log),
        ("open-mode", "append"),
        ("export", "ALL"),
        ("nodes", options.nodes),
        ("ntasks-per-node", tasks),
        ("cpus-per-task", cpus_per_task),
        ("gpus-per-node", gpus),
        ("gres", options.gres),
        ("mem", options.mem),
        ("exclusive", options.exclusive),
        ("time", options.time),
        ("partition", options.partition),
        ("account", options.account),
        ("qos", options.qos),
        ("constraint", options.constraint),
        ("reservation", options.reservation),
        ("mail-user", options.mail_user),
        ("mail-type", options.mail_type or ("END,FAIL" if options.mail_user else None)),
        ("array", f"0-{len(options.seeds) - 1}{limit}" if options.seeds else None),
        ("signal", f"B:USR1@{options.signal_seconds}"),
        ("requeue" if options.requeue else "no-requeue", True),
    ]
    selected = [(name, value) for name, value in values if value is not None and value is not False]
    return [(name, None if value is True else str(value)) for name, value in selected]


def directive_line(name: str, value: str | None) -> str:
    """An #SBATCH line; sbatch has quotes of its own and expands nothing."""
    if value is None:
        return f"#SBATCH --{name}"
    if _PLAIN.fullmatch(value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def sbatch_variable(name: str) -> str:
    """The environment variable that overrides the option in the script."""
    return _VARIABLES.get(name, f"SBATCH_{name.upper().replace('-', '_')}")


_FIRST_PORT, _PORTS = 10000, 20000  # below the ports that Linux uses for connections (32768 and above)

_ARRAY = """\
# Each job of the array trains one seed in its own directory.
seeds=({seeds})
run_dirs=(
{run_dirs}
)
run_dir=${{run_dirs[SLURM_ARRAY_TASK_ID]}}
arguments+=("seed=${{seeds[SLURM_ARRAY_TASK_ID]}}" "output_dir='$run_dir'")
"""

_RENDEZVOUS = """\
# ---- rendezvous: on the first node, at a port derived from the job id. The addresses are SLURM's, because node names
# do not resolve everywhere. The ranks of a single node meet on its loopback interface.
mapfile -t addresses < <(
  scontrol --oneliner show node "$SLURM_JOB_NODELIST" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p'
)
if (( SLURM_JOB_NUM_NODES == 1 )); then addresses=(127.0.0.1); fi
port=$(({first} + SLURM_JOB_ID % {ports}))
for address in 127.0.0.1 "${{addresses[0]}}"; do  # a port in use by another program
  while (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; do port=$((port + 1)); done
done
echo "job $job, start $((restarts + 1)), on $SLURM_JOB_NODELIST; ranks meet at ${{addresses[0]}}:$port"
rm -f -- "$run_dir/stopped.json"  # of an earlier start
if [[ -n $asked ]]; then again "it was asked to stop before it started"; fi
"""

_TORCHRUN = """\
# ---- the ranks: srun starts one torchrun per node, and each torchrun {ranks} of them.
# The restart count in the id keeps out processes of an earlier start of this job. With the static backend torchrun does
# not unpickle what others write to its port, as it does with c10d. It forwards SIGUSR1 and SIGTERM to the ranks, which
# have {timeout} s to write a checkpoint; most clusters signal torchrun only.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={timeout}
torchrun=(
{container}  "$python" -m torch.distributed.run
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={ranks_per_node}
  --rdzv-backend=static --master-addr="${{addresses[0]}}" --master-port="$port" --rdzv-id="$SLURM_JOB_ID-$restarts"
  --max-restarts={max_restarts}
  --signals-to-handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
)
# Run on each node. The ranks choose their network interface by the addresses.
export NODE_ADDRESSES="${{addresses[*]}}"
# shellcheck disable=SC2016  # expanded on the nodes
on_each_node='
  words=$1; shift  # of the torchrun command; the others are the training
  exec "${{@:1:words}}" --node-rank="$SLURM_NODEID" "${{@:words+1}}"
'
ranks_of=(
  srun "${{srun_options[@]}}" --ntasks-per-node=1 bash -c "$on_each_node" bash "${{#torchrun[@]}}" "${{torchrun[@]}}"
)
"""

_SRUN = """\
# ---- the ranks: srun starts {ranks} of them per node, and they read their rank from its variables.
export MASTER_ADDR=${{addresses[0]}} MASTER_PORT=$port
ranks_of=(
  srun "${{srun_options[@]}}" --ntasks-per-node={ranks_per_node}
{container}  "$python"
)
"""

_DOCTOR = """
# ---- the doctor checks all nodes first (slurm.doctor). A signal to this shell ends `wait`, not the doctor.
"${ranks_of[@]}" -m embedtrain doctor "output_dir='$run_dir'" &
ranks=$!
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks" || true; done
if [[ -n $asked ]]; then again "it was asked to stop before it started"; fi
if ! wait "$ranks"; then
  echo "submit: the doctor reports a problem, so the job ends"
  exit 1
fi
"""

_START = """
"${{ranks_of[@]}}" -m embedtrain {command} "${{arguments[@]}}" &
"""


def render_script(submission: Submission, *, command_line: Sequence[str], workdir: str, log: str, python: str) -> str:
    """The text of the sbatch script; `command_line` is that of `submit`, others are as in `directives`."""
    slurm = submission.job.slurm
    sbatch_options = directives(submission.name, slurm, workdir, log)
    text = "".join(
        (
            "#!/bin/bash -l\n" if slurm.setup else "#!/bin/bash\n",
            _head(submission, command_line),
            *(f"{directive_line(name, value)}\n" for name, value in sbatch_options),
            *(f"#SBATCH {line}\n" for line in slurm.extra),
            PROLOGUE.format(max_requeues=slurm.max_requeues if slurm.requeue else 0),
            _environment(slurm),
            _training(submission, python),
            "\n",
            _RENDEZVOUS.format(first=_FIRST_PORT, ports=_PORTS),
            "\n",
            _srun_options(submission),
            _ranks(slurm),
            _DOCTOR if slurm.doctor else "",
            _START.format(command=submission.command.name),
            EPILOGUE,
        )
    )
    assert "\r" not in text
    return text


def _head(submission: Submission, command_line: Sequence[str]) -> str:
    slurm = submission.job.slurm
    size = f"{format_count(slurm.nodes, 'node')} x {format_count(ranks_per_node(slurm), 'rank')}"
    jobs = f", an array of {len(slurm.seeds)} seeds" if slurm.seeds else ""
    # The setup may hold keys, and follows below. A line end would end the comment.
    words = ["slurm.setup=..." if option_of(word) == "slurm.setup" else word for word in command_line]
    return (
        f"# {submission.name}: {size}{jobs}. Written by embedtrain {__version__} for\n"
        f"#   {' '.join(shlex.join(words).split())}\n"
        f"# You may edit it and submit it again with sbatch; it is never overwritten. On another machine, change\n"
        f"# --chdir and python=, and create the folder of --output first: SLURM does not.\n"
        f"\n"
    )


def _environment(slurm: SlurmConfig) -> str:
    lines = "".join(f"{line}\n" for line in slurm.setup)
    heading = f"# ---- environment: that of the submitting shell{', and' if lines else ''}"
    return f"{heading}\n{lines}set -u\nexport PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1\n\n"


def _training(submission: Submission, python: str) -> str:
    lines = [
        "# ---- the training; with the same arguments it resumes from its newest checkpoint, on any machine"
        if submission.is_training
        else "# ---- the command",
        f"python={shlex.quote(python)}",
        "arguments=(",
        *(f"  {shlex.quote(argument)}" for argument in submission.arguments),
        ")",
    ]
    run_dirs = submission.output_dirs if submission.is_training else [str(submission.directory)]
    run_dirs = [shlex.quote(directory) for directory in run_dirs]
    if not submission.job.slurm.seeds:
        return "\n".join([*lines, f"run_dir={run_dirs[0]}", ""])
    seeds = " ".join(map(str, submission.job.slurm.seeds))
    return "\n".join([*lines, _ARRAY.format(seeds=seeds, run_dirs="\n".join(f"  {path}" for path in run_dirs))])


def _srun_options(submission: Submission) -> str:
    slurm = submission.job.slurm
    options: list[str] = ['--nodes="$SLURM_JOB_NUM_NODES"']
    if slurm.cpus_per_node is not None:
        options.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    options.append("--cpu-bind=none")
    if slurm.gpus_per_node:
        options.append("--gpu-bind=none")
    # torchruns also wait for each other. Uploading a model takes time, on the first rank only.
    wait = 60 if slurm.launcher is Launcher.torchrun else 300
    if submission.uploads:
        wait = 3700
    options += ["--kill-on-bad-exit=0", f"--wait={wait}"]
    if slurm.container_image is not None:
        options.append(f"--container-image={shlex.quote(slurm.container_image)}")
        mounts = ",".join(slurm.container_mounts)
        options.append(f"--container-mounts={shlex.quote(mounts)}" if mounts else '--container-mounts="$PWD:$PWD"')
        options.append('--container-workdir="$PWD"')
    options += [shlex.quote(option) for option in slurm.srun_extra]
    lines = "\n".join(f"  {option}" for option in options)
    return (
        "# The ranks of a node share its cores and GPUs. When one has ended, the others have time to end as well\n"
        f"# (--wait), because they may be writing a checkpoint.\nsrun_options=(\n{lines}\n)\n\n"
    )


def _ranks(slurm: SlurmConfig) -> str:
    ranks = ranks_per_node(slurm)
    container = shlex.join(shlex.split(slurm.container_command or ""))
    if slurm.launcher is Launcher.srun:
        return _SRUN.format(ranks=ranks, ranks_per_node=ranks, container=f"  {container}\n" if container else "")
    return _TORCHRUN.format(
        ranks=ranks,
        ranks_per_node=ranks,
        max_restarts=slurm.max_restarts,
        timeout=max(slurm.signal_seconds - 30, slurm.signal_seconds // 2, 1),
        container=f"  {container}\n" if container else "",
    )


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
