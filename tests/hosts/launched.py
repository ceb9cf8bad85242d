"""A training under real torchrun, one agent a host, and its outcome."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.faults.runs import rows, training_result
from tests.hosts.network import Network

OPTIONS = [
    "name=t", "model.path=model", "model.pooling=mean", "data.train=[train.jsonl]", "train.global_batch_size=8",
    "train.log_every=1", "parallel.strategy=fsdp", "parallel.precision=fp32", "evaluation.sets=[dev]",
    "evaluation.at_start=false",
    "checkpoint.every=5", "evaluation.every=20", "optim.lr=1e-3",
]  # fmt: skip
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
# Bytecode and modules come from this checkout, whatever is installed beside it.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def of_one_host(folder: Path, output_dir: str, *more: str, ranks: int = 2) -> tuple[bytes, list[dict[str, Any]]]:
    """The result of the same command on one host, undisturbed."""
    command = [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", "-m", "embedtrain", *OPTIONS]
    done = subprocess.run(
        [*command, f"output_dir={output_dir}", *more],
        cwd=folder, check=False, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return training_result(folder / output_dir)


@dataclass
class Launched:
    """The command on all hosts of a network, under way or over. Every host writes a log of its own."""

    network: Network
    folder: Path
    agents: list["subprocess.Popen[str]"] = field(default_factory=list)
    output_dir: Path = Path()

    def start(self, output_dir: str, *more: str, ranks: int = 1, restarts: int = 0) -> "Launched":
        """Start torchrun on every host."""
        self.output_dir = self.folder / output_dir
        torchrun = [
            TORCHRUN, f"--nnodes={self.network.count}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}",
            f"--master-addr={self.network.address(0)}", "--master-port=29533",
        ]  # fmt: skip
        for host in range(self.network.count):
            with self._log(host).open("w") as log:
                self.agents.append(
                    self.network.start(
                        host,
                        [
                            *torchrun,
                            f"--node-rank={host}",
                            "-m",
                            "embedtrain",
                            *OPTIONS,
                            f"output_dir={output_dir}",
                            *more,
                        ],
                        folder=self.folder,
                        log=log,
                        environment=ENVIRONMENT,
                    )
                )
        return self

    def text(self, host: int) -> str:
        """All that was said on a host."""
        return self._log(host).read_text(errors="replace")

    def errors(self, host: int) -> list[str]:
        return re.findall(r"^error: .*$", self.text(host), re.MULTILINE)

    @property
    def texts(self) -> str:
        return "\n".join(f"==== host {host}\n{self.text(host)}" for host in range(self.network.count))

    @property
    def last_step(self) -> int:
        try:
            return max((row["step"] for row in rows(self.output_dir)), default=0)
        except (OSError, ValueError):
            return 0

    def until_step(self, step: int, timeout: float = 120.0) -> None:
        """Wait until a step is logged, while all agents are there."""
        self.until(lambda: self.last_step >= step, timeout)

    def until(self, condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert all(agent.poll() is None for agent in self.agents), f"over too early\n{self.texts}"
            assert time.monotonic() < deadline, f"never reached\n{self.texts}"
            time.sleep(0.005)

    def wait(self, timeout: float) -> list[int]:
        """Exit codes of the agents, once all have ended by themselves."""
        deadline = time.monotonic() + timeout
        for agent in self.agents:
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"an agent did not end within {timeout} s\n{self.texts}") from None
        return [agent.returncode for agent in self.agents]

    def end(self) -> None:
        """Kill what still runs: agents, and the ranks that they started in sessions of their own."""
        for host in range(self.network.count):
            listed = subprocess.run(
                ["ip", "netns", "pids", self.network.name(host)], check=False, capture_output=True, text=True
            )
            for process in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        for agent in self.agents:
            agent.wait(10)

    def _log(self, host: int) -> Path:
        return self.folder / f"{self.output_dir.name}-{host}.log"
