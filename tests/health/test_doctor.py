"""`python -m embedtrain.doctor` as a process, at one rank and at two, on machines that are not fit."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from embedtrain.doctor.disks import check_disk
from embedtrain.doctor.environment import check_environment
from embedtrain.doctor.finding import Finding, Level, merged
from embedtrain.doctor.options import compose_doctor
from embedtrain.errors import ConfigError
from tests.conftest import ROOT

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]


def doctor(*options: str, ranks: bool = False, code: int = 0, **environment: str) -> str:
    """All that it prints on standard output."""
    command = [*TORCHRUN, "-m"] if ranks else [sys.executable, "-m"]
    done = subprocess.run(
        [*command, "embedtrain.doctor", *options],
        env={**os.environ, **environment}, check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_machine_that_is_not_fit(tmp_path):
    """Each thing that is wrong is told, with what to do; a problem makes the exit code 1."""
    old = tmp_path / "packages" / "wandb-0.10.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.10.0\n")
    (tmp_path / "file").write_text("")
    told = doctor(
        "--json",
        f"output_dir={tmp_path / 'file'}",
        f"cache_dir={tmp_path / 'cache'}",
        code=1,
        PYTHONPATH=f"{ROOT}:{old.parent}",
        ACCELERATE_USE_FSDP="true",
        FSDP_CPU_RAM_EFFICIENT_LOADING="true",
        NCCL_IB_DISABLE="1",
        GLOO_SOCKET_IFNAME="nosuch0",
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}",
        HF_TOKEN="hf_geheim",
        WANDB_API_KEY="ganz-geheim",
    )
    assert "geheim" not in told
    found = json.loads(told)
    assert found["worst"] == "problem"
    by_name = {one["name"]: one for one in found["findings"]}
    levels = {
        "wandb": "problem", "accelerate": "warning", "NCCL_IB_DISABLE": "warning", "GLOO_SOCKET_IFNAME": "problem",
        "hub": "warning", "output_dir": "problem", "cache_dir": "ok",
    }  # fmt: skip
    wandb = [one for one in found["findings"] if one["name"] == "wandb" and one["topic"] == "versions"]
    by_name["wandb"], *_ = wandb
    assert {name: by_name[name]["level"] for name in levels} == levels
    assert by_name["wandb"]["text"].startswith("0.10.0 is installed, needed is <0.32,>=0.31")
    assert by_name["wandb"]["do"].startswith("pip install 'wandb<0.32")
    assert "ACCELERATE_USE_FSDP, FSDP_CPU_RAM_EFFICIENT_LOADING" in by_name["accelerate"]["text"]
    met = by_name["process group"]
    assert met["level"] == "problem"
    assert "could not meet: GLOO_SOCKET_IFNAME=nosuch0: " in met["text"]
    assert "this host has no such interface" in by_name["GLOO_SOCKET_IFNAME"]["text"]
    assert "Connection refused" in by_name["hub"]["text"]
    assert "MB/s" in by_name["cache_dir"]["text"]
    assert all(one["do"] for one in found["findings"] if one["level"] != "ok"), "what is not ok says what to do"


def test_two_ranks(tmp_path):
    """Ranks meet, add up rightly, and the bandwidth between them is measured; what both find is told once."""
    told = doctor(f"output_dir={tmp_path}", f"cache_dir={tmp_path}", "hub=false", ranks=True)
    lines = told.splitlines()
    assert "  ok       process group: 2 on 1 host have met, by gloo" in lines
    assert "  ok       all-reduce: the sum over all ranks is right" in lines
    (bandwidth,) = [line for line in lines if " bandwidth: " in line]
    assert bandwidth.count("GB/s") == 6, bandwidth
    assert "all-gather" in bandwidth
    for once in (" packages: ", " memory: ", " cpu: ", " output_dir: "):
        (line,) = [line for line in lines if once in line]
        assert "(rank" not in line, "it holds for both"
    assert lines[-1].startswith("== 0 problems, ")


def test_ranks_that_cannot_meet():
    """What needs no other rank is told nonetheless."""
    told = doctor("quick=true", code=1, WORLD_SIZE="2", RANK="0")
    assert "problem  process group: they could not meet: WORLD_SIZE=2 but RANK or MASTER_ADDR is missing" in told
    assert " packages: " in told
    assert "speed not measured, because quick=true" in told
    assert "not asked" in told


@pytest.fixture
def mounted(tmp_path):
    """A small file system in memory, and how it is made read-only."""
    if os.geteuid() != 0:
        pytest.skip("file systems are mounted by root")
    place = tmp_path / "mounted"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_folders_that_cannot_be_written(mounted, tmp_path):
    (full,) = check_disk("output_dir", mounted / "runs", measure=True)
    assert full.level is Level.problem
    assert full.text == f"{mounted}/runs (will be made in {mounted}) (tmpfs) cannot be written: No space left on device"
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    (read_only,) = check_disk("cache_dir", mounted, measure=False)
    assert read_only.level is Level.problem
    assert "cannot be written: Read-only file system" in read_only.text
    assert "cache_dir" in read_only.do
    assert not list(tmp_path.glob("**/.embedtrain*"))


def test_a_folder_in_memory(mounted):
    subprocess.run(["mount", "-o", "remount,size=64m", str(mounted)], check=True)
    (found,) = check_disk("output_dir", mounted, measure=False)
    assert found.level is Level.warning
    assert "is gone with the machine" in found.do


def test_interfaces_that_do_not_leave_the_host():
    (found,) = check_environment({"NCCL_SOCKET_IFNAME": "lo"}, num_hosts=2)
    assert found.level is Level.problem
    assert check_environment({"NCCL_SOCKET_IFNAME": "lo"}, num_hosts=1)[0].level is Level.ok
    assert check_environment({"NCCL_SOCKET_IFNAME": "^docker"}, num_hosts=2)[0].text.startswith("^docker")
    (found,) = check_environment({"NCCL_SOCKET_IFNAME": "^nowhere7"}, num_hosts=2)
    assert found.level is Level.ok, "what is left out need not be there"


@pytest.mark.parametrize("variable", ["https_proxy", "HF_ENDPOINT", "WANDB_BASE_URL"])
@pytest.mark.parametrize("before", ["http://me:secret@", "me:secret@", "https://secret@", "http://me:se#cr/secret@"])
def test_passwords_are_not_shown(variable, before):
    (found,) = check_environment({variable: f"{before}proxy:3128/a"}, num_hosts=1)
    assert "secret" not in found.text
    assert found.text.endswith("...@proxy:3128/a")


def test_what_is_no_secret_is_shown():
    texts = [f"{one.name} {one.text}" for one in check_environment(
        {"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN": "hf_1", "HF_ENDPOINT": "http://proxy:80"}, num_hosts=1
    )]  # fmt: skip
    assert texts == ["HF_ENDPOINT http://proxy:80", "HF_TOKEN set", "TOKENIZERS_PARALLELISM false"]


def test_a_folder_below_one_that_is_closed(monkeypatch, tmp_path):
    """Which root would see."""

    def closed(path, **_options):
        if path.name == "runs":
            raise PermissionError(13, "Permission denied")
        return path == tmp_path

    monkeypatch.setattr(Path, "exists", closed)
    (found,) = check_disk("output_dir", tmp_path / "runs", measure=False)
    assert f"(will be made in {tmp_path})" in found.text


def test_what_some_ranks_find_names_them():
    alike, differs = Finding("versions", "python", "3.12"), Finding("devices", "gpu", "hot", Level.warning, "Cool it.")
    found = merged([[alike], [alike, differs], [alike, differs]], ["a", "a", "b"])
    assert [(one.name, one.where) for one in found] == [("python", ""), ("gpu", "rank 1 on a, rank 2 on b")]


def test_options():
    assert compose_doctor(["--json", "quick"]).quick
    with pytest.raises(ConfigError, match="timeout=0"):
        compose_doctor(["timeout=0"])
