"""Jobs submitted as a user does, with `python -m embedtrain submit` on the login node."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.faults.runs import rows
from tests.slurm.cluster import Cluster

OPTIONS = [
    "name=t", "model.path=model", "model.pooling=mean", "data.train=[train.jsonl]", "train.global_batch_size=8",
    "train.log_every=1", "parallel.strategy=fsdp", "parallel.precision=fp32", "evaluation.sets=[dev]",
    "evaluation.at_start=false",
    "train.steps=60", "checkpoint.every=25", "evaluation.every=20", "optim.lr=1e-3", "parallel.timeout=120",
]  # fmt: skip
# Two nodes with one rank each, on the CPU, with time for a checkpoint before the limit.
TWO = ["slurm.nodes=2", "slurm.gpus_per_node=0", "slurm.signal_seconds=60", "slurm.time=10"]
_PACE = str(Path(__file__).parent / "pace")


def own_environment() -> dict[str, str]:
    """The environment of a user, without variables that the tests set for gloo."""
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    path = os.pathsep.join(each for each in (_PACE, str(ROOT), os.environ.get("PYTHONPATH")) if each)
    return environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def torchrun(folder: Path, ranks: int, *arguments: str) -> None:
    """Train to the end without SLURM."""
    program = [str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*program, "-m", "embedtrain", *arguments],
        cwd=folder, env=own_environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


class Jobs:
    """Jobs of one test on a cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.slow = folder / "slow"
        self.slow.unlink(missing_ok=True)
        self.environment = own_environment() | {"SLURM_CONF": str(cluster.conf), "SLOW_WHILE": str(self.slow)}

    def run_submit(self, *arguments: str, code: int = 0, **more: str) -> str:
        """The output of `python -m embedtrain submit`."""
        done = subprocess.run(
            [sys.executable, "-m", "embedtrain", "submit", *arguments],
            cwd=self.folder, env=self.environment | more, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, output_dir: str, *arguments: str) -> str:
        """Submit a job; its number."""
        output = self.run_submit(*OPTIONS, f"output_dir={output_dir}", *arguments)
        match = re.search(r"^job (\d+): ", output, re.MULTILINE)
        assert match, output
        return match[1]

    def slowly(self, seconds: float) -> None:
        """Delay every training step by `seconds` from now on; 0 removes the delay."""
        if seconds:
            self.slow.write_text(str(seconds))
        else:
            self.slow.unlink(missing_ok=True)

    def log(self, output_dir: str, number: str) -> str:
        path = self.folder / output_dir / f"slurm-{number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def step(self, output_dir: str) -> int:
        """The last step in metrics.jsonl."""
        try:
            return max((row["step"] for row in rows(self.folder / output_dir)), default=0)
        except (OSError, ValueError):
            return 0

    def until_step(self, output_dir: str, step: int, number: str) -> None:
        self._until(lambda: self.step(output_dir) >= step, output_dir, number, 180, f"step {step}")

    def until_requeued(self, output_dir: str, number: str, seconds: float = 180) -> None:
        restarted = lambda: int(self.cluster.job(number)["Restarts"]) > 0  # noqa: E731
        self._until(restarted, output_dir, number, seconds, "requeued")

    def until_said(self, output_dir: str, number: str, text: str, seconds: float = 360) -> None:
        self._until(lambda: text in self.log(output_dir, number), output_dir, number, seconds, text)

    def done(self, output_dir: str, number: str, state: str = "COMPLETED", seconds: float = 300) -> str:
        """The log of a job after it has ended as expected."""
        ended = self.cluster.wait(number, seconds)["JobState"]
        log = self.log(output_dir, number)
        assert ended == state, log
        return log

    def _until(self, condition, output_dir: str, number: str, seconds: float, what: str) -> None:
        try:
            self.cluster.until(condition, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log(output_dir, number)}") from None
