"""The submit door where no cluster is: what it shows, what it refuses, and what it hands to sbatch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

OPTIONS = ["name=t", "model.path=some/model", "data.train=[train.jsonl]", "train.steps=3"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"query": "a", "pos": ["b"]}\n')
    (tmp_path / "bin").mkdir()
    return tmp_path


def command_of(folder: Path, name: str, body: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def door(folder: Path, *arguments: str, code: int = 0, **more: str) -> str:
    """Run it; torch cannot be imported, as on many a login node."""
    (folder / "torch.py").write_text("raise ImportError('this machine has no torch')\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    environment |= {"PATH": f"{folder / 'bin'}:/bin", "PYTHONPATH": f"{folder}:{ROOT}", "PWD": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "embedtrain.submit", *OPTIONS, *arguments],
        cwd=folder, env=environment | more, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_dry_run_shows_the_script_and_does_nothing(folder):
    told = door(folder, "slurm.dry_run=true", "slurm.nodes=2")
    assert told.startswith("#!/bin/bash\n# t: 2 nodes x 8 ranks.")
    for line in (f"#SBATCH --chdir={folder}", "#SBATCH --output=runs/t/slurm-%j.log", f"python={sys.executable}"):
        assert f"{line}\n" in told, told
    assert "slurm." not in told.partition("arguments=(")[2]
    assert not (folder / "runs").exists()


def test_what_is_missing_is_one_sentence(folder):
    command_of(folder, "nothing", "true")
    told = door(folder, "slurm.time=60", code=1, PATH=str(folder / "bin"))
    assert told.startswith("error: sbatch is not found: submit from a login node"), told
    assert not (folder / "runs").exists()
    told = door(folder, "data.train=[absent.jsonl]", "slurm.dry_run=true", code=1)
    assert told.startswith("error: data.train: absent.jsonl is not here"), told


def test_a_job_is_submitted_noted_and_not_twice(folder):
    """The script is kept as it was; what a shell or another job has in its environment does not change the job."""
    command_of(folder, "sbatch", f"env > {folder}/env; printf '%s\\n' \"$@\" > {folder}/words; echo '4711;here'")
    command_of(folder, "squeue", f"cat {folder}/queue 2>/dev/null")
    inherited = {
        "SLURM_NTASKS": "9", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "other", "SBATCH_TIMELIMIT": "1",
        "SBATCH_WCKEY": "stays",
    }  # fmt: skip
    given = ["slurm.partition=gpu", "slurm.cpus_per_node=8"]
    told = door(folder, *given, **inherited)
    assert "job 4711: t on 1 x 8 ranks" in told
    assert "tail -F runs/t/slurm-4711.log" in told
    assert "note     SBATCH_PARTITION in the environment is left out" in told
    assert (folder / "words").read_text().split() == ["--parsable", "runs/t/submit.sbatch"]
    passed = dict(line.split("=", 1) for line in (folder / "env").read_text().splitlines() if "=" in line)
    assert {name: passed.get(name) for name in inherited} == {
        "SLURM_NTASKS": None, "SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": None, "SBATCH_TIMELIMIT": "1",
        "SBATCH_WCKEY": "stays",
    }  # fmt: skip
    script = folder / "runs" / "t" / "submit.sbatch"
    script.write_text(script.read_text() + "# mine\n")
    (folder / "queue").write_text("12 RUNNING\n4711 PENDING\n")
    assert door(folder, *given, code=1).startswith("error: job 4711 for runs/t is pending already")
    (folder / "queue").write_text("")
    assert "runs/t/submit-2.sbatch" in door(folder, *given)
    assert script.read_text().endswith("# mine\n")
    noted = [json.loads(line) for line in (folder / "runs" / "t" / "submitted.jsonl").read_text().splitlines()]
    assert [(each["job"], each["script"]) for each in noted] == [
        ("4711", "submit.sbatch"), ("4711", "submit-2.sbatch")
    ]  # fmt: skip


def test_what_sbatch_says_is_passed_on(folder):
    command_of(folder, "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    told = door(folder, "slurm.time=60", code=1)
    assert told == "error: sbatch refuses runs/t/submit.sbatch: Batch job submission failed: Invalid qos\n"


def test_help_names_its_options(folder):
    told = door(folder, "--help")
    assert "signal_seconds: 300" in told
    assert "python -m embedtrain --help" in told


def test_ranks_cannot_submit(folder):
    told = door(folder, code=1, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    assert told == "error: submit needs no ranks: start it with python, not with torchrun or srun\n"
