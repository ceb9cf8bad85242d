"""Launchers forward signals, torchrun restarts a run after a rank was killed; when it is killed, its ranks end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import OPTIONS, finish, training_result

TORCHRUN = [
    str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2", "--max-restarts=2",
    "--signals-to-handle=SIGTERM,SIGUSR1", "-m", "embedtrain",
]  # fmt: skip
OWN_LAUNCHER = [sys.executable, "-m", "embedtrain", "train", "--nproc-per-node=2"]


@dataclass
class Launched:
    """A run that torchrun has started."""

    launcher: subprocess.Popen[bytes]
    output_dir: Path
    log_file: Path
    ranks: list[psutil.Process] = field(default_factory=list)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def find_ranks(self) -> list[psutil.Process]:
        self.ranks = psutil.Process(self.launcher.pid).children()
        return self.ranks

    def until_step(self, step: int) -> None:
        self.until(lambda: any(int(number) >= step for number in re.findall(r"^step (\d+)/", self.log, re.MULTILINE)))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not condition():
            assert any(process.is_running() for process in self.ranks) or self.launcher.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.005)


@contextlib.contextmanager
def launched(folder: Path, output_dir: str, *more: str, launcher: Sequence[str] = TORCHRUN) -> Iterator[Launched]:
    """Start the command with a launcher; at the end of the block, kill what is left of it."""
    log = folder / f"{output_dir}-{time.monotonic_ns()}.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*launcher, *OPTIONS, *more, f"output_dir={folder / output_dir}"],
            cwd=folder, stdout=sink, stderr=subprocess.STDOUT,
            # Of torch 2.13; 2.11 always waits 30 seconds.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"},
        )  # fmt: skip
    run = Launched(process, folder / output_dir, log)
    try:
        yield run
    finally:
        for remaining in [*run.find_ranks(), process] if process.poll() is None else run.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                remaining.kill()
        process.wait()


@pytest.mark.slow
def test_restarted_and_stopped(folder, undisturbed):
    """A rank is killed: torchrun restarts all ranks. SIGUSR1 to torchrun: both ranks save the same step."""
    out = folder / "launched"
    with launched(folder, "launched", "checkpoint.every=1") as run:
        run.until_step(2)
        run.until(lambda: any(out.glob("checkpoints/step-*/checkpoint.json")))  # written while training continues
        killed, *_ = run.find_ranks()
        killed.kill()
        killed.wait()
        run.until_step(5)
        run.launcher.send_signal(signal.SIGUSR1)
        assert run.launcher.wait(timeout=120) != 0
        output = run.log
    assert output.count("resuming from ") == 1
    assert output.count("error: rank ") == 1, output
    assert re.search(r"error: rank \d on \S+ ended while .+, step \d+; .*checkpoint", output)
    stopped = json.loads((out / "stopped.json").read_text())
    assert stopped["signal"] == "SIGUSR1"
    assert len(re.findall(r"stopped by SIGUSR1 \(rank [01]\) after step ", output)) == 1, "either rank"
    assert (out / "checkpoints" / f"step-{stopped['step']:08d}" / "checkpoint.json").is_file()
    finish(folder, "launched")
    assert training_result(out) == undisturbed


@pytest.mark.slow  # tests/distributed/test_launch.py has ranks that do not train
@pytest.mark.parametrize(("received", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str)
def test_the_own_launcher_waits_for_the_checkpoint(folder, undisturbed, received, code):
    out = folder / f"own-{code}"
    with launched(folder, out.name, launcher=OWN_LAUNCHER) as run:
        run.until_step(2)
        run.launcher.send_signal(received)
        assert run.launcher.wait(timeout=120) == code
        assert "Traceback" not in run.log
        assert run.log.count(f"stopped by {received.name} (rank ") == 1
    step = json.loads((out / "stopped.json").read_text())["step"]
    assert (out / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").is_file()
    finish(folder, out.name)
    assert training_result(out) == undisturbed


@pytest.mark.slow  # one process: tests/distributed/watchdog/test_launcher.py
def test_the_launcher_is_killed(folder, undisturbed):
    """Its store ends with it: the ranks still save a checkpoint, and the same command resumes at once."""
    out = folder / "orphaned"
    with launched(folder, "orphaned") as run:
        run.until_step(2)
        _, suspended = run.find_ranks()
        suspended.suspend()  # the steps are short: the run would end before the ranks notice
        run.launcher.kill()
        run.until(lambda: "the launcher (process " in run.log)
        suspended.resume()
        assert not psutil.wait_procs(run.ranks, timeout=60)[1]
        assert run.log.count("the launcher (process ") == 1
        assert run.log.count("stopped by SIGTERM (rank ") == 1
        assert "Traceback" not in run.log
    step = json.loads((out / "stopped.json").read_text())["step"]
    assert 2 <= step < 12
    assert (out / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").is_file()
    finish(folder, "orphaned")
    assert training_result(out) == undisturbed
