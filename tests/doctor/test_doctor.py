"""`python -m embedtrain doctor` with one rank and with two, on machines with problems."""

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from embedtrain.commands.doctor import compose_doctor
from embedtrain.commands.doctor.checks import check_environment, check_versions
from embedtrain.commands.doctor.host import Finding, Level, check_disk, merge_findings, unpickles_rendezvous
from embedtrain.distributed.world import nccl_error_handling
from embedtrain.errors import ConfigError
from tests.conftest import ROOT

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]


def doctor(*options: str, ranks: bool = False, code: int = 0, **environment: str) -> str:
    """Its standard output."""
    command = [*TORCHRUN, "-m"] if ranks else [sys.executable, "-m"]
    done = subprocess.run(
        [*command, "embedtrain", "doctor", *options],
        env={**os.environ, **environment}, check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_machine_with_problems(tmp_path):
    """Each problem is reported with what to do, and the exit code is 1."""
    old = tmp_path / "packages" / "wandb-0.10.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.10.0\n")
    (tmp_path / "file").write_text("")
    output = doctor(
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
    assert "geheim" not in output
    report = json.loads(output)
    assert report["worst"] == "problem"
    by_name = {finding["name"]: finding for finding in report["findings"]}
    levels = {
        "wandb": "problem", "accelerate": "warning", "NCCL_IB_DISABLE": "warning", "GLOO_SOCKET_IFNAME": "problem",
        "hub": "warning", "output_dir": "problem", "cache_dir": "ok",
    }  # fmt: skip
    by_name["wandb"] = next(
        finding for finding in report["findings"] if (finding["name"], finding["topic"]) == ("wandb", "versions")
    )
    assert {name: by_name[name]["level"] for name in levels} == levels
    assert by_name["wandb"]["text"].startswith("0.10.0 is installed, required is <0.32,>=0.31")
    assert by_name["wandb"]["do"].startswith("pip install 'wandb<0.32")
    assert "ACCELERATE_USE_FSDP, FSDP_CPU_RAM_EFFICIENT_LOADING" in by_name["accelerate"]["text"]
    group = by_name["process group"]
    assert group["level"] == "problem"
    assert "GLOO_SOCKET_IFNAME=nosuch0" in group["text"]
    assert by_name["GLOO_SOCKET_IFNAME"]["text"].startswith("nosuch0")
    assert "Connection refused" in by_name["hub"]["text"]
    assert "MB/s" in by_name["cache_dir"]["text"]
    assert all(finding["do"] for finding in report["findings"] if finding["level"] != "ok")


def test_a_release_that_is_not_supported_yet(monkeypatch):
    """The reason is said, because other libraries ask for it."""
    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "5.24.0" if name == "transformers" else installed(name)
    )
    (finding,) = [finding for finding in check_versions() if finding.name == "transformers"]
    assert finding.level is Level.problem
    assert finding.text.startswith("5.24.0 is installed, required is <5.24")
    assert re.match(r"pip install 'transformers<5\.24,>=5\.17': .* PEFT 0\.22", finding.do)


def test_two_ranks(tmp_path):
    """Ranks join, their sum is correct, bandwidth is measured, and common findings are printed once."""
    output = doctor(f"output_dir={tmp_path}", f"cache_dir={tmp_path}", "hub=false", ranks=True)
    lines = output.splitlines()
    assert "  ok       process group: 2 ranks on 1 host joined with gloo" in lines
    assert "  ok       all-reduce: the sum over all ranks is correct" in lines
    (bandwidth,) = [line for line in lines if " bandwidth: " in line]
    assert bandwidth.count("GB/s") == 6, bandwidth
    assert "all-gather" in bandwidth
    (port,) = [line for line in lines if " ports: " in line]
    assert re.search(r"warning  ports: torchrun on .* listens on all interfaces: .* can execute code", port)
    for once in (" packages: ", " memory: ", " cpu: ", " output_dir: "):
        (line,) = [line for line in lines if once in line]
        assert "(rank" not in line, "it holds for both ranks"
    assert lines[-1].startswith("== 0 problems, ")


@pytest.mark.parametrize(
    ("command", "unpickles"),
    [
        ("torchrun --standalone --nproc-per-node 2 --master-port=1", True),
        ("torchrun --nproc-per-node 2 -m embedtrain", True),
        ("torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint=10.0.0.1:29500", True),
        ("torchrun --nnodes 2 --rdzv_backend=etcd-v2 --rdzv_endpoint a:1", True),
        ("torchrun --nproc-per-node 2 --master_port 29500", False),
        ("python /env/bin/accelerate launch --num_processes 2 -m embedtrain", False),
        ("torchrun --rdzv-backend=static --rdzv-endpoint=10.0.0.1:29500", False),
        ("torchrun --rdzv-backend static --master-addr 10.0.0.1 --master-port=29500", False),
    ],
)
def test_a_rendezvous_that_executes_code(command, unpickles):
    assert unpickles_rendezvous(command.split()) is unpickles


def test_ranks_that_cannot_join():
    """The checks of each process are reported nevertheless."""
    output = doctor("quick=true", code=1, WORLD_SIZE="2", RANK="0")
    assert re.search(r"problem  process group: .*WORLD_SIZE=2.*MASTER_ADDR", output)
    assert " packages: " in output
    assert "speed not measured, because quick=true" in output
    assert " hub: not checked" in output


@pytest.fixture
def mounted(tmp_path):
    """A small file system in memory."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount file systems")
    path = tmp_path / "mounted"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"mount failed: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_directories_that_cannot_be_written(mounted, tmp_path):
    (full,) = check_disk("output_dir", mounted / "runs", measure=True)
    assert full.level is Level.problem
    assert (
        full.text == f"{mounted}/runs (will be created in {mounted}) (tmpfs) cannot be written: No space left on device"
    )
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    (read_only,) = check_disk("cache_dir", mounted, measure=False)
    assert read_only.level is Level.problem
    assert "cannot be written: Read-only file system" in read_only.text
    assert "cache_dir" in read_only.do
    assert not list(tmp_path.glob("**/.embedtrain*"))


def test_a_directory_in_memory(mounted):
    subprocess.run(["mount", "-o", "remount,size=64m", str(mounted)], check=True)
    (finding,) = check_disk("output_dir", mounted, measure=False)
    assert finding.level is Level.warning
    assert "output_dir" in finding.do


def test_interfaces_that_do_not_leave_the_host():
    (finding,) = check_environment({"NCCL_SOCKET_IFNAME": "lo"}, num_hosts=2)
    assert finding.level is Level.problem
    assert check_environment({"NCCL_SOCKET_IFNAME": "lo"}, num_hosts=1)[0].level is Level.ok
    assert check_environment({"NCCL_SOCKET_IFNAME": "^docker"}, num_hosts=2)[0].text.startswith("^docker")
    (finding,) = check_environment({"NCCL_SOCKET_IFNAME": "^nowhere7"}, num_hosts=2)
    assert finding.level is Level.ok, "an excluded interface need not exist"


def test_nccl_is_not_to_end_a_process_before_the_lost_rank_is_named():
    """The doctor advises what training sets."""
    best = nccl_error_handling({})
    for value in "0123":
        (finding,) = check_environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": value}, num_hosts=1)
        assert finding.level is (Level.ok if value == best else Level.warning), finding
        assert finding.text.startswith(value)


@pytest.mark.parametrize("variable", ["https_proxy", "HF_ENDPOINT", "WANDB_BASE_URL"])
@pytest.mark.parametrize("before", ["http://me:secret@", "me:secret@", "https://secret@", "http://me:se#cr/secret@"])
def test_passwords_are_not_shown(variable, before):
    (finding,) = check_environment({variable: f"{before}proxy:3128/a"}, num_hosts=1)
    assert "secret" not in finding.text
    assert finding.text.endswith("...@proxy:3128/a")


def test_other_values_are_shown():
    texts = [f"{finding.name} {finding.text}" for finding in check_environment(
        {"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN": "hf_1", "HF_ENDPOINT": "http://proxy:80"}, num_hosts=1
    )]  # fmt: skip
    assert texts == ["HF_ENDPOINT http://proxy:80", "HF_TOKEN set", "TOKENIZERS_PARALLELISM false"]


def test_a_directory_below_one_without_permission(monkeypatch, tmp_path):
    """Simulated, because root has all permissions."""

    def closed(path, **_options):
        if path.name == "runs":
            raise PermissionError(13, "Permission denied")
        return path == tmp_path

    monkeypatch.setattr(Path, "exists", closed)
    (finding,) = check_disk("output_dir", tmp_path / "runs", measure=False)
    assert f"(will be created in {tmp_path})" in finding.text


def test_findings_of_some_ranks_name_them():
    common, other = Finding("versions", "python", "3.12"), Finding("devices", "gpu", "hot", Level.warning, "Cool it.")
    findings = merge_findings([[common], [common, other], [common, other]], ["a", "a", "b"])
    assert [(finding.name, finding.where) for finding in findings] == [
        ("python", ""),
        ("gpu", "rank 1 on a, rank 2 on b"),
    ]


def test_options():
    assert compose_doctor(["--json", "quick"]).quick
    with pytest.raises(ConfigError, match=r"join_timeout=0"):
        compose_doctor(["join_timeout=0"])
