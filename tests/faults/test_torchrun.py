"""torchrun restarts a run after a rank was killed, and forwards a scheduler's signal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.faults.runs import OPTIONS, finish, rows, training_result

TORCHRUN = [
    str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2", "--max-restarts=2",
    "--signals-to-handle=SIGTERM,SIGUSR1", "--shutdown-timeout=60",
]  # fmt: skip


def test_restarted_and_stopped(folder, undisturbed):
    """A rank is killed: torchrun restarts all ranks. SIGUSR1 to torchrun: both ranks save the same step."""
    log = folder / "torchrun.log"
    out = folder / "launched"
    with log.open("w") as sink:
        launcher = subprocess.Popen(
            [*TORCHRUN, "-m", "embedtrain", *OPTIONS, "checkpoint.every=1", f"output_dir={out}"],
            cwd=folder, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def until_step(step: int) -> None:
        deadline = time.monotonic() + 150
        while not ((out / "metrics.jsonl").exists() and any(row["step"] >= step for row in rows(out))):
            assert launcher.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.005)

    until_step(2)
    killed, *_ = psutil.Process(launcher.pid).children()
    killed.kill()
    killed.wait()
    until_step(5)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(timeout=120) != 0
    output = log.read_text()
    assert output.count("resuming from ") == 1
    assert output.count("error: rank ") == 1, output
    assert re.search(r"error: rank \d on \S+ ended while .+, step \d+; .*checkpoint", output)
    stopped = json.loads((out / "stopped.json").read_text())
    assert stopped["signal"] == "SIGUSR1"
    assert len(re.findall(r"stopped by SIGUSR1 \(rank [01]\) after step ", output)) == 1, "either rank"
    assert (out / "checkpoints" / f"step-{stopped['step']:08d}" / "checkpoint.json").is_file()
    finish(folder, "launched")
    assert training_result(out) == undisturbed
