"""The launcher: ranks as real processes, their environment, signals, exit codes, ports and several nodes."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from embedtrain.config.launch import Launch, split_launch_options
from embedtrain.errors import ConfigError
from tests.conftest import ROOT
from tests.forked import fork_context

RANK = "tests.distributed.launched_rank"


class Launched:
    """A launcher in a process of its own, whose ranks run `launched_rank` in `folder`."""

    def __init__(self, folder: Path, mode: str, launch: Launch, ranks: int = 2) -> None:
        self.log = folder / f"log-{launch.node_rank}"
        arguments = (folder, self.log, mode, launch, ranks)
        self.process = fork_context().Process(target=launch_in, args=arguments)
        self.process.start()

    def wait(self) -> int | None:
        self.process.join(60)
        self.process.kill()
        return self.process.exitcode

    @property
    def output(self) -> str:
        return self.log.read_text()


def launch_in(folder: Path, log: Path, mode: str, launch: Launch, ranks: int) -> None:
    from embedtrain.distributed.launch import run_ranks

    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.pop("OMP_NUM_THREADS", None)
    os._exit(run_ranks(RANK, [mode], launch, ranks))


def until_ready(folder: Path, ranks: int = 2) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_have_the_environment_of_torchrun(tmp_path):
    launched = Launched(tmp_path, "environment", Launch())
    assert launched.wait() == 0
    assert sorted(launched.output.splitlines()) == ["0 2 0 2 127.0.0.1  0", "1 2 1 2 127.0.0.1  0"]


@pytest.mark.parametrize(
    ("received", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)], ids=str
)
def test_signals_reach_the_ranks_and_their_exit_code_is_returned(tmp_path, received, code):
    launched = Launched(tmp_path, "wait", Launch(max_restarts=1))
    until_ready(tmp_path)
    processes = [psutil.Process(launched.process.pid), *psutil.Process(launched.process.pid).children()]
    listening = [c.laddr.ip for process in processes for c in process.net_connections() if c.status == "LISTEN"]
    assert listening == ["127.0.0.1"]
    os.kill(launched.process.pid, received)
    assert launched.wait() == code
    assert sorted(launched.output.splitlines()) == ["rank 0 has saved", "rank 1 has saved"]


def test_a_failure_is_reported_by_the_rank_alone(tmp_path):
    launched = Launched(tmp_path, "fail", Launch())
    assert launched.wait() == 1
    assert launched.output == "error: rank 1 has failed\n"


def test_a_killed_rank_is_reported(tmp_path):
    launched = Launched(tmp_path, "killed", Launch())
    assert launched.wait() == 1
    assert re.fullmatch(r"error: SIGKILL ended rank 1 \(process \d+ on .*\n", launched.output)


def test_a_killed_rank_that_another_one_reports_is_one_error(tmp_path):
    launched = Launched(tmp_path, "noticed", Launch())
    assert launched.wait() == 1
    error, cause = launched.output.splitlines()
    assert error == "error: rank 1 ended while training"
    assert re.fullmatch(r"SIGKILL ended rank 1 \(process \d+ on .*", cause)


def test_failed_ranks_are_restarted(tmp_path):
    launched = Launched(tmp_path, "restart", Launch(max_restarts=1))
    assert (launched.wait(), launched.output) == (0, "")


def test_two_nodes_meet(tmp_path):
    """With different numbers of ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        Launched(tmp_path, "environment", Launch(nodes=2, node_rank=node, host="localhost", port=port), ranks=node + 1)
        for node in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0]
    outputs = [node.output.splitlines() for node in nodes]
    for node, lines in enumerate(outputs):
        assert lines[0] == f"node {node}: waiting for 1 other node at localhost:{port}"
    # torch also logs that the store has gone, on the node that ends last.
    of_ranks = [sorted(line for line in lines if re.match(r"\d 3 ", line)) for lines in outputs]
    assert of_ranks[0] == ["0 3 0 1 localhost  0"]
    assert of_ranks[1] == ["1 3 0 2 localhost  1", "2 3 1 2 localhost  1"]


def test_a_signal_ends_a_node_that_waits_for_the_others(tmp_path):
    launched = Launched(tmp_path, "environment", Launch(nodes=2, host="localhost", port=0))
    deadline = time.monotonic() + 60
    while not launched.log.exists() or "waiting" not in launched.output:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(launched.process.pid, signal.SIGINT)
    assert launched.wait() == 130
    assert "stopped by SIGINT" in launched.output


@pytest.mark.parametrize(
    ("arguments", "launch", "others"),
    [
        ([], None, []),
        (["--gpus=auto", "a=1"], Launch(), ["a=1"]),
        (["a=1", "--gpus", "8", "--config-dir", "d"], Launch(gpus=8), ["a=1", "--config-dir", "d"]),
        (["--nproc_per_node=2", "-m", "a=1,2"], Launch(processes=2), ["-m", "a=1,2"]),
        (
            ["--nodes", "2", "--node-rank", "1", "--master", "[fe80::1]:7", "--max-restarts", "3"],
            Launch(nodes=2, node_rank=1, host="fe80::1", port=7, max_restarts=3),
            [],
        ),
        (["--nodes", "2", "--node-rank=0", "--master=n0"], Launch(nodes=2, host="n0", port=29500), []),
        (["--gpus=8", "--nodes=1", "--node-rank=0", "--master=n0"], Launch(gpus=8), []),
    ],
)
def test_options_are_separated_from_those_of_the_command(arguments, launch, others):
    assert split_launch_options(arguments, {}) == (launch, others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpus 0", "--gpus 0: .* at least 1"),
        ("--gpus 0,1", "--gpus 0,1: .*CUDA_VISIBLE_DEVICES"),
        ("--gpus", "--gpus"),
        ("--gpus 2 --nproc-per-node 2", "--gpus and --nproc-per-node"),
        ("--nodes 2", "--node-rank and --master missing"),
        ("--nodes 2 --node-rank 0", "--master missing"),
        ("--nodes 2 --node-rank 2 --master a", "--node-rank 2: .* from 0 to 1"),
        ("--node-rank 1", "--node-rank 1 .* --nodes"),
        ("--nodes 1 --node-rank 1 --master a", "--node-rank 1 .* --nodes"),
        ("--master a", "--master a .* --nodes"),
        ("--nodes 2 --node-rank 1 --master a:b", "--master a:b"),
        ("--nodes 2 --node-rank 1 --master a:70000", "--master a:70000"),
    ],
)
def test_impossible_options(arguments, message):
    with pytest.raises(ConfigError, match=message):
        split_launch_options(arguments.split(), {})


def test_options_are_rejected_in_a_rank_of_another_launcher():
    assert split_launch_options(["--gpus=auto", "a=1"], {"RANK": "0"}) == (None, ["a=1"])
    with pytest.raises(ConfigError, match=r"--gpus 2: .*rank 3"):
        split_launch_options(["--gpus", "2"], {"RANK": "3"})


def test_more_gpus_than_there_are(monkeypatch):
    from embedtrain.cli import entry as cli

    monkeypatch.setattr(cli, "num_visible_gpus", lambda: 2)
    assert [cli.num_ranks(options) for options in (Launch(), Launch(gpus=1), Launch(processes=5))] == [2, 1, 5]
    with pytest.raises(ConfigError, match=r"--gpus 3: .* 2 visible GPUs"):
        cli.num_ranks(Launch(gpus=3))
    monkeypatch.setattr(cli, "num_visible_gpus", lambda: 0)
    assert cli.num_ranks(Launch()) == 1
    with pytest.raises(ConfigError, match=r"--gpus 3: .*--nproc-per-node 3"):
        cli.num_ranks(Launch(gpus=3))
