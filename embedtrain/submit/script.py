"""The sbatch script: written for who has to approve, read or edit it."""

import re
import shlex
from collections.abc import Sequence

from embedtrain import __version__
from embedtrain.config.recipe import Recipe
from embedtrain.submit.options import Launcher, SlurmConfig, Submission, ranks_per_node

# Before anything else runs: a signal may come while modules are still being loaded.
PROLOGUE = """\

set -eo pipefail
job=$SLURM_JOB_ID  # of an array ARRAY_TASK: the number of its last job means all of them
if [[ -n ${{SLURM_ARRAY_JOB_ID:-}} ]]; then job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
restarts=${{SLURM_RESTART_COUNT:-0}}
max_requeues={max_requeues}
ranks=  # the process of srun, once it runs

# ---- signals. SLURM sends this shell USR1 some time before the limit (--signal above), and before a preemption where
# the cluster is set up so; TERM comes with scancel, and with a preemption elsewhere. Ranks are asked for a checkpoint,
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

# ---- going on. The job goes back into the queue under the same id, and its next start goes on from the newest
# checkpoint.
again() {{
  local state
  state=$(squeue --noheader --jobs="$job" --format=%T 2>/dev/null || true)
  if [[ ${{state:-RUNNING}} != RUNNING ]]; then
    echo "submit: $1; the job is $state, so SLURM decides what becomes of it"
  elif (( restarts >= max_requeues )); then
    echo "submit: $1; it has been requeued $restarts times and is not again (slurm.max_requeues)"
  elif scontrol requeue "$job"; then
    echo "submit: $1; the job is requeued"
  else
    echo "submit: $1; the job cannot be requeued: submit this script again, and the run goes on"
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

# ---- what became of it. A signal to this shell ends `wait`, not the ranks.
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
  echo "submit: somebody asked the ranks to stop, so it is not requeued; submit this script again to go on"
  exit 75
fi

# An error. A node that is gone looks like one to the others, and SLURM notices later than they do: a step that does
# nothing tells. Where not even the first node takes one, nothing can be said.
if (( SLURM_JOB_NUM_NODES > 1 )) &&
  ! timeout 90 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 true &&
  timeout 90 srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" true; then
  again "a node does not answer"
fi
exit "$status"
"""

_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
# Of these the variables that sbatch reads are named otherwise than SBATCH_OPTION.
_VARIABLES = {"time": "SBATCH_TIMELIMIT", "array": "SBATCH_ARRAY_INX", "mem": "SBATCH_MEM_PER_NODE"}


def directives(recipe: Recipe, options: SlurmConfig, workdir: str, log: str) -> list[tuple[str, str | None]]:
    """Options of sbatch and their values, in the order of the script; None: one without a value.

    Args:
        recipe: what is trained.
        options: checked.
        workdir: the folder that the job starts in, absolute.
        log: the file that it writes, with SLURM's patterns.
    """
    per_task = None
    tasks = ranks_per_node(options) if options.launcher is Launcher.srun else 1
    if options.cpus_per_node is not None:
        per_task = options.cpus_per_node // tasks
    gpus = None
    if options.gpus_per_node and options.gres is None:
        gpus = f"{options.gpu_type}:{options.gpus_per_node}" if options.gpu_type else str(options.gpus_per_node)
    at_once = f"%{options.seeds_at_once}" if options.seeds_at_once is not None else ""
    last = len(options.seeds) - 1
    asked: list[tuple[str, str | int | bool | None]] = [
        ("job-name", options.job_name or recipe.name),
        ("chdir", workdir),
        ("output", log),
        ("open-mode", "append"),
        ("export", "ALL"),
        ("nodes", options.nodes),
        ("ntasks-per-node", tasks),
        ("cpus-per-task", per_task),
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
        ("array", f"0-{last}{at_once}" if options.seeds else None),
        ("signal", f"B:USR1@{options.signal_seconds}"),
        ("requeue" if options.requeue else "no-requeue", True),
    ]
    given = [(name, value) for name, value in asked if value is not None and value is not False]
    return [(name, None if value is True else str(value)) for name, value in given]


def written(name: str, value: str | None) -> str:
    """One option as a line that sbatch reads, which has quotes of its own and expands nothing."""
    if value is None:
        return f"#SBATCH --{name}"
    if _PLAIN.fullmatch(value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def sbatch_variable(name: str) -> str:
    """The variable of the environment that sbatch would obey rather than the script's option of that name."""
    return _VARIABLES.get(name, f"SBATCH_{name.upper().replace('-', '_')}")


_FIRST_PORT, _PORTS = 10000, 20000  # below what Linux gives to connections (32768 and above)

_ARRAY = """\
# Each job of the array trains one seed in a directory of its own.
seeds=({seeds})
run_dirs=(
{run_dirs}
)
run_dir=${{run_dirs[SLURM_ARRAY_TASK_ID]}}
arguments+=("seed=${{seeds[SLURM_ARRAY_TASK_ID]}}" "output_dir='$run_dir'")
"""

_MEETING = """\
# ---- where the ranks meet: on the first node, at a port of this job's own. SLURM is asked for addresses, for names of
# nodes do not resolve everywhere.
mapfile -t addresses < <(
  scontrol --oneliner show node "$SLURM_JOB_NODELIST" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p'
)
port=$(({first} + SLURM_JOB_ID % {ports}))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done  # another program has it
echo "job $job, start $((restarts + 1)), on $SLURM_JOB_NODELIST; ranks meet at ${{addresses[0]}}:$port"
rm -f -- "$run_dir/stopped.json"  # of an earlier start
if [[ -n $asked ]]; then again "it was asked to stop before it began"; fi
"""

_TORCHRUN = """\
# ---- the ranks: srun starts one torchrun a node, and that {ranks} of them.
# The restart count in the id keeps out what is left of an earlier start of this job. SIGUSR1 and SIGTERM are handed on
# to the ranks, which have {patience} s to write a checkpoint; most clusters signal torchrun alone.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={patience}
torchrun=(
{container}  "$python" -m torch.distributed.run
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={ranks_per_node}
  --rdzv-backend=c10d --rdzv-endpoint="${{addresses[0]}}:$port" --rdzv-id="$SLURM_JOB_ID-$restarts"
  --max-restarts={max_restarts}
  --signals-to-handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
)
# Run on each node: who it is, and whether the others meet here, are told; torchrun would guess both from host names.
export NODE_ADDRESSES="${{addresses[*]}}"
# shellcheck disable=SC2016  # expanded on the nodes
on_each_node='
  words=$1; shift  # of torchrun; behind them is the training
  read -ra of_nodes <<<"$NODE_ADDRESSES"
  exec "${{@:1:words}}" --local-addr="${{of_nodes[SLURM_NODEID]}}" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" \\
    "${{@:words+1}}"
'
srun "${{srun_options[@]}}" --ntasks-per-node=1 \\
  bash -c "$on_each_node" bash "${{#torchrun[@]}}" "${{torchrun[@]}}" -m embedtrain "${{arguments[@]}}" &
"""

_SRUN = """\
# ---- the ranks: srun starts {ranks} of them a node, and they take their places from its variables.
export MASTER_ADDR=${{addresses[0]}} MASTER_PORT=$port
srun "${{srun_options[@]}}" --ntasks-per-node={ranks_per_node} \\
{container}  "$python" -m embedtrain "${{arguments[@]}}" &
"""


def render_script(submission: Submission, *, command: Sequence[str], workdir: str, log: str, python: str) -> str:
    """The text of the sbatch script.

    Args:
        submission: what is trained, and what is asked of the cluster.
        command: the command line that asked for it.
        workdir: the folder that the job starts in, absolute.
        log: the file that the job writes, with SLURM's patterns.
        python: that runs in it.
    """
    slurm = submission.slurm
    asked = directives(submission.recipe, slurm, workdir, log)
    text = "".join(
        (
            "#!/bin/bash -l\n" if slurm.setup else "#!/bin/bash\n",
            _head(submission, command),
            *(f"{written(name, value)}\n" for name, value in asked),
            *(f"#SBATCH {line}\n" for line in slurm.extra),
            PROLOGUE.format(max_requeues=slurm.max_requeues if slurm.requeue else 0),
            _environment(slurm),
            _training(submission, python),
            "\n",
            _MEETING.format(first=_FIRST_PORT, ports=_PORTS),
            "\n",
            _srun_options(submission),
            _ranks(slurm),
            EPILOGUE,
        )
    )
    assert "\r" not in text
    return text


def _head(submission: Submission, command: Sequence[str]) -> str:
    slurm, recipe = submission.slurm, submission.recipe
    each, nodes = ranks_per_node(slurm), slurm.nodes
    size = f"{nodes} node{'s' * (nodes > 1)} x {each} rank{'s' * (each > 1)}"
    jobs = f", an array of {len(slurm.seeds)} seeds" if slurm.seeds else ""
    return (
        f"# {recipe.name}: {size}{jobs}. Written by embedtrain {__version__} for\n"
        f"#   {' '.join(shlex.join(command).split())}\n"  # a line end within would end the comment
        f"# Edit it as you like: it is never overwritten, and sbatch takes it again.\n"
        f"\n"
    )


def _environment(slurm: SlurmConfig) -> str:
    lines = "".join(f"{line}\n" for line in slurm.setup)
    return f"# ---- environment: that of the shell that submitted{', and' if lines else ''}\n{lines}" + (
        "set -u\nexport PYTHONUNBUFFERED=1\n\n"
    )


def _training(submission: Submission, python: str) -> str:
    lines = [
        "# ---- the training; with the same arguments it goes on from its newest checkpoint, here or anywhere",
        f"python={shlex.quote(python)}",
        "arguments=(",
        *(f"  {shlex.quote(argument)}" for argument in submission.arguments),
        ")",
    ]
    if not submission.slurm.seeds:
        return "\n".join([*lines, f"run_dir={shlex.quote(submission.output_dirs[0])}", ""])
    return (
        "\n".join(lines)
        + "\n"
        + _ARRAY.format(
            seeds=" ".join(map(str, submission.slurm.seeds)),
            run_dirs="\n".join(f"  {shlex.quote(output_dir)}" for output_dir in submission.output_dirs),
        )
    )


def _srun_options(submission: Submission) -> str:
    slurm = submission.slurm
    given: list[str] = ['--nodes="$SLURM_JOB_NUM_NODES"']
    if slurm.cpus_per_node is not None:
        given.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    given.append("--cpu-bind=none")
    if slurm.gpus_per_node:
        given.append("--gpu-bind=none")
    # torchruns wait for each other besides. A model that is uploaded takes its time, on the first rank alone.
    wait = 60 if slurm.launcher is Launcher.torchrun else 300
    if submission.recipe.tracking.wandb_artifacts or submission.recipe.export.push_to_hub is not None:
        wait = 3700
    given += ["--kill-on-bad-exit=0", f"--wait={wait}"]
    if slurm.container_image is not None:
        given.append(f"--container-image={shlex.quote(slurm.container_image)}")
        mounts = ",".join(slurm.container_mounts)
        given.append(f"--container-mounts={shlex.quote(mounts)}" if mounts else '--container-mounts="$PWD:$PWD"')
        given.append('--container-workdir="$PWD"')
    given += [shlex.quote(option) for option in slurm.srun_extra]
    options = "\n".join(f"  {option}" for option in given)
    return (
        "# Ranks of a node share its cores and GPUs as they need them. One that ends leaves the others time (--wait)\n"
        f"# to end as well: they may be writing.\nsrun_options=(\n{options}\n)\n\n"
    )


def _ranks(slurm: SlurmConfig) -> str:
    each = ranks_per_node(slurm)
    words = [] if slurm.container_command is None else shlex.split(slurm.container_command)
    container = shlex.join(words)
    if slurm.launcher is Launcher.srun:
        return _SRUN.format(ranks=each, ranks_per_node=each, container=f"  {container} \\\n" if container else "")
    return _TORCHRUN.format(
        ranks=each,
        ranks_per_node=each,
        max_restarts=slurm.max_restarts,
        patience=max(slurm.signal_seconds - 30, slurm.signal_seconds // 2, 1),
        container=f"  {container}\n" if container else "",
    )
