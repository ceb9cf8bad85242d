"""The script of submit on a real SLURM with two nodes: time limits, preemption, lost nodes, arrays, errors."""

import json
import math
import time

import pytest

from tests.faults.runs import rows, training_result
from tests.slurm.jobs import TWO, Jobs

pytestmark = pytest.mark.slurm


def test_two_nodes_equal_two_local_ranks(jobs, folder, uninterrupted):
    number = jobs.submit("two", *TWO)
    log = jobs.done("two", number)
    assert "on 2 ranks (cpu)" in log, log
    assert "submit: done" in log
    assert training_result(folder / "two") == uninterrupted
    assert jobs.cluster.job(number)["Restarts"] == "0"


def reach_the_limit(jobs: Jobs, output_dir: str, number: str) -> None:
    """Shorten the time limit of a job so that its signal is due now, and the limit a minute later."""
    began = time.mktime(time.strptime(jobs.cluster.job(number)["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    minutes = math.ceil((time.time() - began) / 60) + 1
    jobs.cluster.call("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
    jobs.until_requeued(output_dir, number)


def resumed(jobs: Jobs, output_dir: str, number: str, uninterrupted) -> str:
    """The log of a job that stopped after a checkpoint, resumed, and has the result of an uninterrupted one."""
    log = jobs.done(output_dir, number)
    assert "after a checkpoint: {" in log, log
    assert "the job is requeued" in log, log
    assert "start 2, on n[1-2]" in log
    assert log.count("resuming from ") == 1, log
    assert training_result(jobs.folder / output_dir) == uninterrupted
    assert not (jobs.folder / output_dir / "stopped.json").exists()
    return log


def test_a_time_limit(jobs, uninterrupted):
    jobs.slowly(4)
    number = jobs.submit("limit", *TWO, "slurm.max_restarts=3")
    jobs.until_step("limit", 3, number)
    reach_the_limit(jobs, "limit", number)
    jobs.slowly(0)
    log = resumed(jobs, "limit", number, uninterrupted)
    assert "stopped by SIGUSR1" in log, log


def test_a_time_limit_if_signals_reach_only_torchrun(plain_jobs, uninterrupted):
    plain_jobs.slowly(4)
    number = plain_jobs.submit("limit-plain", *TWO, "slurm.max_restarts=3")
    plain_jobs.until_step("limit-plain", 3, number)
    reach_the_limit(plain_jobs, "limit-plain", number)
    plain_jobs.slowly(0)
    resumed(plain_jobs, "limit-plain", number, uninterrupted)


def preempt(jobs: Jobs, output_dir: str, number: str) -> None:
    """Run a job of the partition with priority on all nodes."""
    above = jobs.cluster.call(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"
    ).strip()
    jobs.until_requeued(output_dir, number)
    jobs.slowly(0)
    assert jobs.cluster.wait(above)["JobState"] == "COMPLETED"


def test_a_preemption(jobs, uninterrupted):
    jobs.slowly(4)
    number = jobs.submit("preempted", *TWO, "slurm.partition=low")
    jobs.until_step("preempted", 3, number)
    preempt(jobs, "preempted", number)
    resumed(jobs, "preempted", number, uninterrupted)


def test_a_preemption_with_sigterm_without_torchrun(plain_jobs, uninterrupted):
    plain_jobs.slowly(4)
    number = plain_jobs.submit("preempted-plain", *TWO, "slurm.partition=low", "slurm.launcher=srun")
    plain_jobs.until_step("preempted-plain", 3, number)
    preempt(plain_jobs, "preempted-plain", number)
    log = resumed(plain_jobs, "preempted-plain", number, uninterrupted)
    assert "stopped by SIGTERM" in log, log


def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(jobs, folder, uninterrupted):
    jobs.slowly(1)
    number = jobs.submit("lost", *TWO, "checkpoint.every=5", "checkpoint.keep=100")
    jobs.until_step("lost", 7, number)
    jobs.cluster.power_off("n2")
    jobs.slowly(0)
    jobs.until_requeued("lost", number)
    jobs.cluster.power_on("n2")
    log = jobs.done("lost", number)
    assert "resuming from " in log, log
    assert training_result(folder / "lost") == uninterrupted


def test_a_lost_node_is_detected_before_slurm_notices(plain_jobs):
    """SLURM detects a dead node after minutes, the other ranks after seconds: an empty step finds it.

    The job is not started again here: the controller still has a kill for the silent node in its queue, and delivers
    it to the job's next start where the same node comes back for it.
    """
    plain_jobs.slowly(1)
    number = plain_jobs.submit("missed", *TWO, "checkpoint.every=5", "slurm.max_requeues=1")
    plain_jobs.until_step("missed", 7, number)
    plain_jobs.cluster.power_off("n2")
    plain_jobs.until_said("missed", number, "a node does not answer; the job is requeued")
    # SLURM does this itself eventually; until then the job waits for a node that cannot report its end.
    plain_jobs.cluster.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=silent")
    plain_jobs.cluster.until(lambda: plain_jobs.cluster.job(number)["JobState"] == "PENDING", 60, "the job waits")
    assert plain_jobs.cluster.job(number)["Restarts"] == "1"
    assert "NODE FAILURE" not in plain_jobs.log("missed", number)


def test_an_error_is_not_requeued(jobs, folder):
    bad = folder / "bad.jsonl"
    bad.write_text('{"query": "a", "pos": ["b"]}\n{"query": "a"}\n')
    number = jobs.submit("wrong", *TWO, "data.train=[bad.jsonl]")
    log = jobs.done("wrong", number, "FAILED")
    assert "bad.jsonl:2: " in log, log
    assert "requeued" not in log
    assert jobs.cluster.job(number)["Restarts"] == "0"


def test_a_cancelled_job_is_not_requeued(jobs, folder):
    """A signal to the ranks only stops them after a checkpoint, also without a requeue."""
    jobs.slowly(4)
    number = jobs.submit("cancelled", *TWO)
    jobs.until_step("cancelled", 2, number)
    output = jobs.run_submit("name=t", "model.path=model", "data.train=[train.jsonl]", "train.steps=1", *TWO,
                     "output_dir=cancelled", code=1)  # fmt: skip
    assert f"error: job {number} for cancelled is already running" in output
    jobs.cluster.call("scancel", "--signal=TERM", number)
    log = jobs.done("cancelled", number, "FAILED")
    assert "it is not requeued" in log, log
    assert json.loads((folder / "cancelled" / "stopped.json").read_text())["signal"] == "SIGTERM"
    again = jobs.submit("cancelled", *TWO)
    jobs.until_step("cancelled", 4, again)
    jobs.cluster.call("scancel", again)
    assert "the job is requeued" not in jobs.done("cancelled", again, "CANCELLED")
    assert jobs.cluster.job(again)["Restarts"] == "0"
    assert sorted(path.name for path in (folder / "cancelled").glob("*.sbatch")) == ["submit.sbatch"]


def test_an_array_of_seeds(jobs, folder):
    """Each trains in its own directory, and interrupting one does not affect the others."""
    jobs.slowly(3)
    number = jobs.submit("seeds", *TWO, "slurm.seeds=[7,8]", "train.steps=12", "slurm.nodes=1", "evaluation.every=0")
    for seed in (7, 8):
        jobs.until_step(f"seeds/seed-{seed}", 1, number)
    jobs.cluster.call("scancel", "--batch", "--signal=USR1", f"{number}_1")
    path = folder / "seeds" / f"slurm-{number}_1.log"
    jobs.cluster.until(lambda: "the job is requeued" in path.read_text(), 120, "the second is requeued")
    jobs.slowly(0)
    jobs.cluster.until(lambda: not jobs.cluster.call("squeue", "--noheader").strip(), 300, "both jobs end")
    assert "start 2" in path.read_text()
    assert "start 2" not in (folder / "seeds" / f"slurm-{number}_0.log").read_text()
    losses = []
    for index, seed in enumerate((7, 8)):
        log = (folder / "seeds" / f"slurm-{number}_{index}.log").read_text()
        assert "submit: done" in log, log
        assert f"seed: {seed}\n" in (folder / "seeds" / f"seed-{seed}" / "recipe.yaml").read_text()
        losses.append([row["loss"] for row in rows(folder / "seeds" / f"seed-{seed}") if "loss" in row])
    assert losses[0] != losses[1]


def test_unusual_names_are_kept(jobs, folder):
    """Paths and variables with blanks, quotes, $, % and characters outside ASCII."""
    odd = 'odd 名 $HOME "x" 100% #1'
    number = jobs.submit(
        odd.replace('"', '\\"').join('""'), "slurm.nodes=1", "slurm.gpus_per_node=0", "train.steps=2", "name='a b; c'",
        'slurm.job_name=x "y" $z 名', "slurm.setup=export MARK='it is here'; echo \"mark: ${MARK}\"",
        'slurm.extra=--comment="a b"', "evaluation.sets=[]", "evaluation.every=0",
    )  # fmt: skip
    log = jobs.done(odd, number)
    assert "mark: it is here" in log
    assert (folder / odd / "model" / "model.safetensors").is_file()
    assert (folder / odd / "submit.sbatch").is_file()


def test_the_message_of_sbatch_is_one_sentence(jobs):
    output = jobs.run_submit("name=t", "model.path=model", "data.train=[train.jsonl]", "train.steps=1", *TWO,
                     "slurm.partition=none", "output_dir=refused", code=1)  # fmt: skip
    assert "error: sbatch rejects refused/submit.sbatch: " in output
    assert "Invalid partition name" in output
    assert output.count("\n") == 1, output
