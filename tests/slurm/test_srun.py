"""`srun python -m embedtrain` without torchrun: every task is a rank, and other processes stay alone."""

import json
import subprocess
import sys

import pytest

from tests.faults.runs import rows, training_result
from tests.slurm.jobs import OPTIONS, torchrun

pytestmark = pytest.mark.slurm
_FOUR = ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--wait=60"]
# What every command does first, and the variables that a process has afterwards.
_PRINT_RANK = (
    "import os\n"
    "from embedtrain.distributed.srun import set_ranks_from_srun\n"
    "set_ranks_from_srun(os.environ)\n"
    "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')\n"
    "node = os.environ.get('SLURMD_NODENAME')\n"
    "print('rank', *(os.environ.get(name) for name in names), node)\n"
)


def start(jobs, *words: str):
    return subprocess.Popen(
        words, cwd=jobs.folder, env=jobs.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(output: str) -> list[list[str]]:
    return sorted(line.split()[1:] for line in output.splitlines() if line.startswith("rank "))


def test_four_tasks_on_two_nodes_equal_four_ranks_of_torchrun(jobs, folder):
    """Also with a cyclic distribution and an interruption by a signal, whose exit code srun returns."""
    options = [*OPTIONS, "train.steps=12", "evaluation.every=0"]
    train = [*_FOUR, "--distribution=cyclic", sys.executable, "-m", "embedtrain", *options, "output_dir=tasks"]
    jobs.slowly(4)
    running = start(jobs, *train)
    jobs.cluster.until(lambda: jobs.step("tasks") >= 2, 240, "step 2")
    number = jobs.cluster.call("squeue", "--noheader", "--format=%A").strip()
    jobs.cluster.call("scancel", "--signal=USR1", number)
    output = running.communicate(timeout=240)[0]
    assert running.returncode == 75, output
    assert output.count("stopped by SIGUSR1") == 1, output
    assert json.loads((folder / "tasks" / "stopped.json").read_text())["signal"] == "SIGUSR1"
    jobs.slowly(0)
    again = start(jobs, *train)
    output = again.communicate(timeout=300)[0]
    assert again.returncode == 0, output
    assert "t on 4 ranks (cpu)" in output, output
    assert output.count("resuming from ") == 1, output
    torchrun(folder, 4, *options, "output_dir=four")
    assert training_result(folder / "tasks") == training_result(folder / "four")


def test_other_commands_have_ranks_as_well(jobs, folder):
    evaluate = ["embedtrain", "evaluate", "model=model", "pooling=mean", "sets=[dev]", "output_dir=evaluated"]
    evaluated = start(jobs, *_FOUR, sys.executable, "-m", *evaluate)
    output = evaluated.communicate(timeout=300)[0]
    assert evaluated.returncode == 0, output
    assert len(rows(folder / "evaluated")) == 1, "one rank writes"


def test_the_rank_of_every_task(jobs):
    output = start(jobs, *_FOUR, "--distribution=cyclic", sys.executable, "-c", _PRINT_RANK).communicate(timeout=120)[0]
    assert ranks_of(output) == [
        ["0", "4", "0", "2", "127.0.0.1", "lo", "n1"],
        ["1", "4", "1", "2", "127.0.0.1", "lo", "n1"],
        ["2", "4", "0", "2", "127.0.0.1", "lo", "n2"],
        ["3", "4", "1", "2", "127.0.0.1", "lo", "n2"],
    ], output  # fmt: skip
    uneven = start(jobs, "srun", "--nodes=2", "--ntasks=3", sys.executable, "-c", _PRINT_RANK).communicate(timeout=120)[
        0
    ]
    assert [rank[:4] for rank in ranks_of(uneven)] == [["0", "3", "0", "2"], ["1", "3", "1", "2"], ["2", "3", "0", "1"]]


def test_single_processes_stay_alone(jobs, folder):
    """In the shells of a batch script and of salloc, which have variables of SLURM too, and in a step with one task."""
    path = folder / "rank.py"
    path.write_text(_PRINT_RANK)
    alone = [["None"] * 5]
    jobs.cluster.call(
        "sbatch", "--wait", "--nodes=2", "--ntasks=4", f"--chdir={folder}", "--output=rank.log", "--export=ALL",
        f"--wrap=PYTHONPATH={jobs.environment['PYTHONPATH']} {sys.executable} rank.py",
    )  # fmt: skip
    assert [rank[:5] for rank in ranks_of((folder / "rank.log").read_text())] == alone
    for words in (["salloc", "--nodes=2", "--ntasks=4"], ["srun", "--ntasks=1"]):
        output = start(jobs, *words, sys.executable, str(path)).communicate(timeout=120)[0]
        assert [rank[:5] for rank in ranks_of(output)] == alone, output


def test_help_is_printed_once(jobs):
    output = start(jobs, *_FOUR, sys.executable, "-m", "embedtrain", "--help").communicate(timeout=180)[0]
    assert output.count("embedtrain train: ") == 1, output
