"""The part of an sbatch script that watches over a training: signals, what became of it, and whether it goes on."""

# Before anything else runs: a signal may come while modules are still being loaded.
SOONER = """\

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

LATER = """\
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
