"""`python -m embedtrain submit` without a cluster: what it prints, rejects and passes to sbatch."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from embedtrain.commands.submit.options import compose_submit
from embedtrain.commands.submit.sbatch import models_to_download
from embedtrain.errors import ConfigError
from tests.conftest import ROOT

OPTIONS = ["name=t", "model.path=some/model", "data.train=[train.jsonl]", "train.steps=3"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"query": "a", "pos": ["b"]}\n')
    (tmp_path / "bin").mkdir()
    return tmp_path


def write_command(folder: Path, name: str, body: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def submit(folder: Path, *arguments: str, code: int = 0, **more: str) -> str:
    """Output of the command; torch cannot be imported, as on many login nodes."""
    (folder / "torch.py").write_text("raise ImportError('this machine has no torch')\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "HF_"))}
    environment |= {"PATH": f"{folder / 'bin'}:/bin", "PYTHONPATH": f"{folder}:{ROOT}", "PWD": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "embedtrain", "submit", *OPTIONS, *arguments],
        cwd=folder, env=environment | more, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_dry_run_prints_the_script_and_does_nothing_else(folder):
    output = submit(folder, "slurm.dry_run=true", "slurm.nodes=2")
    assert output.startswith("#!/bin/bash\n# t: 2 nodes x 8 ranks.")
    for line in (f"#SBATCH --chdir={folder}", "#SBATCH --output=runs/t/slurm-%j.log", f"python={sys.executable}"):
        assert f"{line}\n" in output, output
    assert "slurm." not in output.partition("arguments=(")[2].partition("note: ")[0]
    assert not (folder / "runs").exists()


def test_missing_programs_and_files_are_rejected(folder):
    write_command(folder, "nothing", "true")
    output = submit(folder, "slurm.time=60", code=1, PATH=str(folder / "bin"))
    assert output.startswith("error: sbatch is not found"), output
    assert not (folder / "runs").exists()
    output = submit(folder, "data.train=[absent.jsonl]", "slurm.dry_run=true", code=1)
    assert output.startswith("error: data.train: absent.jsonl"), output


@pytest.mark.parametrize("command", [(), ("evaluate", "sets=[dev.jsonl]")])
def test_a_model_that_an_offline_job_cannot_download_is_rejected(folder, command, monkeypatch):
    monkeypatch.chdir(folder)
    Path("dev.jsonl").write_text('{"query": "a", "pos": ["b"]}\n')
    options = ["model=owner/name"] if command else [*OPTIONS[:1], "model.path=owner/name", *OPTIONS[2:]]

    def job(*more):
        submission = compose_submit([*command, *options, *more])
        return models_to_download(submission.models, submission.job.slurm.setup)

    option = "model" if command else "model.path"
    with pytest.raises(ConfigError, match=rf"^{option}=owner/name is not in the cache .* hf download owner/name"):
        job("slurm.setup=[export HF_HUB_OFFLINE=1]")
    (note,) = job("slurm.setup=[export HF_HUB_OFFLINE=0]")
    assert note.startswith(f"{option}=owner/name is not in the cache")
    snapshot = folder / "hub" / "models--owner--name"
    (snapshot / "snapshots" / "abc").mkdir(parents=True)
    (snapshot / "snapshots" / "abc" / "modules.json").write_text("[]")
    (snapshot / "refs").mkdir()
    (snapshot / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    assert job("slurm.setup=[export HF_HUB_OFFLINE=1]") == []


@pytest.mark.slow
def test_a_job_is_submitted_recorded_and_not_submitted_twice(folder):
    """An edited script is kept, and variables of the shell or another job do not change the job."""
    write_command(folder, "sbatch", f"env > {folder}/env; printf '%s\\n' \"$@\" > {folder}/words; echo '4711;here'")
    write_command(folder, "squeue", f"cat {folder}/queue 2>/dev/null")
    inherited = {
        "SLURM_NTASKS": "9", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "other", "SBATCH_TIMELIMIT": "1",
        "SBATCH_WCKEY": "stays",
    }  # fmt: skip
    options = ["slurm.partition=gpu", "slurm.cpus_per_node=8", "slurm.setup=export WANDB_API_KEY=ganz-geheim"]
    output = submit(folder, *options, **inherited)
    assert "job 4711: t on 1 x 8 ranks" in output
    assert "tail -F runs/t/slurm-4711.log" in output
    assert "note     SBATCH_PARTITION in the environment is ignored" in output
    assert (folder / "words").read_text().split() == ["--parsable", "runs/t/submit.sbatch"]
    environment = dict(line.split("=", 1) for line in (folder / "env").read_text().splitlines() if "=" in line)
    assert {name: environment.get(name) for name in inherited} == {
        "SLURM_NTASKS": None, "SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": None, "SBATCH_TIMELIMIT": "1",
        "SBATCH_WCKEY": "stays",
    }  # fmt: skip
    script = folder / "runs" / "t" / "submit.sbatch"
    assert stat.S_IMODE(script.stat().st_mode) == 0o600
    assert script.read_text().count("ganz-geheim") == 1, "also in the comment with the command"
    script.write_text(script.read_text() + "# mine\n")
    (folder / "queue").write_text("12 RUNNING\n4711 PENDING\n")
    assert submit(folder, *options, code=1).startswith("error: job 4711 for runs/t is already pending")
    (folder / "queue").write_text("")
    assert "runs/t/submit-2.sbatch" in submit(folder, *options)
    assert script.read_text().endswith("# mine\n")
    jobs = [json.loads(line) for line in (folder / "runs" / "t" / "submitted.jsonl").read_text().splitlines()]
    assert [(job["job"], job["script"]) for job in jobs] == [
        ("4711", "submit.sbatch"), ("4711", "submit-2.sbatch")
    ]  # fmt: skip


def test_cpus_are_derived_and_open_options_are_listed(folder):
    """The GPUs' share of the CPUs, the smallest of the partition's nodes that have as many GPUs."""
    rows = ["gpu*|96|gpu:a100:8(S:0-1)|1:00:00|2-00:00:00", "gpu*|64+|gpu:a100:4,craynetwork:4|1:00:00|2-00:00:00",
            "gpu*|8|(null)|1:00:00|2-00:00:00", "big|128|gpu:8|n/a|infinite"]  # fmt: skip
    write_command(folder, "sinfo", f"printf '%s\\n' {' '.join(map(repr, rows))}")
    output = submit(folder, "slurm.dry_run=true", "slurm.gpus_per_node=2")
    assert "#SBATCH --cpus-per-task=24\n" in output
    assert "note: slurm.cpus_per_node=24" in output
    assert "note: slurm.time is not set, so the limit of partition gpu, 1:00:00, applies" in output
    output = submit(folder, "slurm.dry_run=true", "slurm.partition=big", "slurm.launcher=srun", "slurm.mem=0")
    assert "#SBATCH --cpus-per-task=16\n" in output
    assert "partition big, infinite, applies" in output
    assert "slurm.mem" not in output.partition("note:")[2]
    output = submit(folder, "slurm.dry_run=true", "slurm.partition=other")
    assert "--cpus-per-task" not in output.replace("slurm.cpus_per_node", "")
    assert "note: slurm.cpus_per_node is not set" in output


def test_the_message_of_sbatch_is_passed_on(folder):
    write_command(folder, "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    output = submit(folder, "slurm.time=60", code=1)
    assert output == "error: sbatch rejects runs/t/submit.sbatch: Batch job submission failed: Invalid qos\n"


def test_help_lists_its_options(folder):
    output = submit(folder, "--help")
    assert "slurm.gpus_per_node=8" in output
    assert "embedtrain train --help" in output
    assert "slurm.signal_seconds=300" in submit(folder, "--help", "slurm")


def test_several_ranks_are_rejected(folder):
    output = submit(folder, code=1, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    assert output.startswith("error: submit runs in a single process")
