"""The sbatch script as text: shellcheck, quoting, and its options of sbatch."""

import itertools
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from embedtrain.commands.submit.options import (
    Launcher,
    SlurmConfig,
    Submission,
    SubmitOptions,
    check_slurm,
    compose_submit,
)
from embedtrain.commands.submit.sbatch import render_script
from embedtrain.config.commands import COMMANDS
from embedtrain.config.recipe import Recipe

RECIPE = ["name=t", "model.path=model", "data.train=[train.jsonl]", "train.steps=3"]
# A word with all characters that a shell, sbatch or Hydra would interpret.
ODD = """a b "c" $HOME `id` $(id) #!&|;<>~* 名 \\"""


@cache
def recipe() -> Recipe:
    return compose_submit(RECIPE).recipe


def script(*arguments: str, output_dirs=("runs/t",), workdir="/work dir", python="/env/bin/python", **slurm) -> str:
    submission = Submission(
        command=COMMANDS["train"],
        arguments=[*RECIPE, *arguments],
        name="t",
        output_dirs=list(output_dirs),
        recipe=recipe(),
        job=SubmitOptions(slurm=check_slurm(SlurmConfig(**slurm))),
    )
    command_line = ["python", "-m", "embedtrain", "submit", *arguments]
    return render_script(
        submission, command_line=command_line, workdir=str(workdir), log="t-%j.log", python=str(python)
    )


def sbatch_options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


_LAUNCHER = [{}, {"launcher": Launcher.srun, "doctor": True}]
_SIZE = [{}, {"nodes": 4, "gpus_per_node": 0}, {"cpus_per_node": 64, "gpu_type": "a100"}]
_SEEDS = [{}, {"seeds": [1, 2, 3], "seeds_at_once": 2}]
_CONTAINER = [
    {},
    {"container_image": "/images/a b.sqsh", "container_mounts": ["/data:/data"]},
    {"container_command": "apptainer exec --nv --bind '/my data' image.sif"},
]
_MORE = [
    {},
    {
        "setup": ["module load cuda/12.4", "source /env/bin/activate"], "extra": ["--exclude=n1"], "mem": "0",
        "account": ODD, "constraint": "a100&nvlink", "time": "1-00:00:00", "mail_user": "me@example.org",
        "srun_extra": ["--mpi=none"], "exclusive": True, "requeue": False, "doctor": True,
    },
]  # fmt: skip


def test_bash_and_shellcheck_accept_the_script(tmp_path):
    """In every combination of launcher, size, seeds, container and further options."""
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    paths = []
    for number, parts in enumerate(itertools.product(_LAUNCHER, _SIZE, _SEEDS, _CONTAINER, _MORE)):
        path = tmp_path / f"{number}.sbatch"
        options = dict(itertools.chain(*(part.items() for part in parts)))
        path.write_text(script("optim.lr=1e-3", output_dirs=[f"runs/{seed}" for seed in range(3)], **options))
        subprocess.run(["bash", "-n", path], check=True)
        if number < 36 or number % 5 == 0:  # only some of the other launcher's, which share most of the text
            paths.append(path)
    done = subprocess.run([shellcheck, "--exclude=SC1091", *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_arguments_reach_the_training_unchanged(tmp_path):
    """Runs the script with stand-ins for SLURM's commands that record their arguments."""
    arguments = [
        'model.query_prompt="it\'s $HOME, `id` & #1; 名: "',
        "data.instruction_format='{instruction} \"x\" {text}'",
        "train.steps=4",
    ]
    words = run(tmp_path, script(*arguments, workdir=tmp_path, python=tmp_path / "recorder"))
    index = words.index("embedtrain")
    assert words[index + 1 :] == ["train", *RECIPE, *arguments]
    assert words[index - 1] == "-m"
    rendezvous = {"--rdzv-backend=static", "--node-rank=0", "--rdzv-id=12-3", "--master-addr=127.0.0.1"}
    assert rendezvous <= set(words), "a single node needs no other interface than loopback"
    assert any(re.fullmatch(r"--master-port=100[12]\d", word) for word in words)
    words = run(tmp_path, script(*arguments, nodes=2, workdir=tmp_path, python=tmp_path / "recorder"),
                SLURM_JOB_NUM_NODES="2")  # fmt: skip
    assert {"--nnodes=2", "--master-addr=10.0.0.1"} <= set(words)


@pytest.mark.parametrize("launcher", [Launcher.torchrun, Launcher.srun])
def test_the_doctor_checks_the_nodes_first(tmp_path, launcher):
    text = script(workdir=tmp_path, python=tmp_path / "recorder", doctor=True, launcher=launcher)
    words = run(tmp_path, text)
    first, second = (index for index, word in enumerate(words) if word == "-m" and "embedtrain" in words[index + 1])
    assert (words[first + 2], words[second + 2]) == ("doctor", "train")
    (tmp_path / "words").unlink()
    assert words[first + 3] == "output_dir='runs/t'", "the doctor checks the disk of the run"
    words = run(tmp_path, text.replace("output_dir='$run_dir'", "FAIL"), fails=True)
    assert words[-1] == "FAIL", "the training does not start"


def test_each_seed_has_its_own_directory(tmp_path):
    submission = compose_submit([*RECIPE, "slurm.seeds=[5,6]", "output_dir='runs/a b 名'"])
    text = script(seeds=[5, 6], output_dirs=submission.output_dirs, workdir=tmp_path, python=tmp_path / "recorder")
    words = run(tmp_path, text, SLURM_ARRAY_TASK_ID="1")
    assert words[-2:] == ["seed=6", "output_dir='runs/a b 名/seed-6'"]
    assert compose_submit(words[words.index("embedtrain") + 1 :]).output_dirs == ["runs/a b 名/seed-6"]


def test_directories_that_contain_the_seed_are_kept():
    submission = compose_submit([*RECIPE, "slurm.seeds=[5,6]", "output_dir='runs/x-${seed}'"])
    assert submission.output_dirs == ["runs/x-5", "runs/x-6"]


def test_a_container_command_precedes_python(tmp_path):
    container = {"container_command": "env 'A=b c'", "launcher": Launcher.srun}
    words = run(tmp_path, script(workdir=tmp_path, python=tmp_path / "recorder", **container))
    assert words[:2] == ["-m", "embedtrain"], "env has started python"


def run(tmp_path: Path, text: str, *, fails: bool = False, **more: str) -> list[str]:
    """What `python` is called with when the script runs; it fails if its last argument is FAIL."""
    words = tmp_path / "words"
    for name, body in {
        "recorder": f'printf "%s\\0" "$@" >> {words}; [[ ${{@: -1}} != FAIL ]]',
        "scontrol": 'echo "NodeName=n1 Arch=x NodeAddr=10.0.0.1 NodeHostName=n1"',
        "srun": 'while [[ $1 == -* ]]; do shift; done; export SLURM_NODEID=0; exec "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/root", "SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11",
        "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "3", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environment | more, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "submit: done" in done.stdout) == (int(fails), not fails), done.stdout + done.stderr
    return words.read_text().split("\0")[:-1]


def test_options_of_sbatch():
    text = script(
        nodes=4, gpus_per_node=8, time="2-00:00:00", partition="gpu", account="nlp", qos="long", cpus_per_node=96,
        mem="500G", extra=["--exclude=n13"],
    )  # fmt: skip
    assert sbatch_options(text) == [
        "--job-name=t", '--chdir="/work dir"', "--output=t-%j.log", "--open-mode=append", "--export=ALL", "--nodes=4",
        "--ntasks-per-node=1", "--cpus-per-task=96", "--gpus-per-node=8", "--mem=500G", "--time=2-00:00:00",
        "--partition=gpu", "--account=nlp", "--qos=long", "--signal=B:USR1@300", "--requeue", "--exclude=n13",
    ]  # fmt: skip
    assert "--nproc-per-node=8" in text


def test_with_srun_each_rank_is_a_task():
    text = script(launcher=Launcher.srun, cpus_per_node=96, gres="gpu:a100:8")
    for line in ("--ntasks-per-node=8", "--cpus-per-task=12", "--gres=gpu:a100:8"):
        assert line in sbatch_options(text)
    assert "torch.distributed.run" not in text
    assert not any("gpus-per-node" in line for line in sbatch_options(text))


def test_values_cannot_add_options():
    """A value becomes neither a second option nor a comment."""
    (line,) = [line for line in sbatch_options(script(account=ODD)) if line.startswith("--account")]
    match = re.fullmatch(r'--account="((?:[^"\\]|\\.)*)"', line)
    assert match is not None, line
    assert re.sub(r"\\(.)", r"\1", match[1]) == ODD


def test_the_head_has_only_comments():
    lines = script("slurm.setup=[module load cuda,\n  exit 1]").splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line == "" or line.startswith("#") for line in lines[:first])


def test_srun_waits_for_an_upload():
    assert "  --wait=60\n" in script()
    submission = compose_submit([*RECIPE, "tracking.wandb=true", "tracking.wandb_artifacts=true"])
    text = render_script(submission, command_line=[], workdir="/w", log="l", python="python")
    assert "  --wait=3700\n" in text


def test_requeueing_can_be_turned_off():
    text = script(requeue=False)
    assert "--no-requeue" in sbatch_options(text)
    assert "max_requeues=0\n" in text
