"""Start a training, and observe it from outside: its steps, its memory, what it prints, and how it ends."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.rivals.libraries import Library
from benchmarks.rivals.scripts.common import Training

POLL = 0.05  # seconds between looks
TIMEOUT = 1800  # seconds that a training may take
WARM_UP_STEPS = 2  # left out of the time of a step
# Every process computes with one thread, because each rank has one core.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "WANDB_MODE": "disabled",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(slots=True)
class Observation:
    """What was seen of one training. Times are seconds since its start.

    Attributes:
        exit_code: of the command; None if it was ended after `timeout`.
        seconds: until the command ended.
        steps: time of the end of each step.
        saves: time of each checkpoint, as the library reports it.
        peak_mib: largest peak of a rank's memory: resident, or on the GPU.
        first_step: number of the first step, which tells where a run resumed.
        tail: last lines of its output, of which torchrun alone prints about fifty when a rank fails.
        last_step: number of the last step.
        acted_at: time of what was done to it.
    """

    exit_code: int | None = None
    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    first_step: int = 0
    tail: list[str] = field(default_factory=list)
    last_step: int = 0
    acted_at: float | None = None

    @property
    def step_seconds(self) -> float:
        """Median time of a step, without the first ones and without steps that a checkpoint follows."""
        pairs = list(zip(self.steps[WARM_UP_STEPS - 1 :], self.steps[WARM_UP_STEPS:], strict=False))
        return median(end - start for start, end in pairs)

    @property
    def finished(self) -> bool:
        """Whether it ended without an error."""
        return self.exit_code == 0


def write_settings(training: Training, folder: Path) -> Path:
    """The settings file of a training."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    path.write_text(json.dumps(dataclasses.asdict(training), indent=1))
    return path


def observe(
    library: Library,
    training: Training,
    folder: Path,
    *,
    act_at: int = 0,
    act: Callable[[Mapping[int, psutil.Process]], None] | None = None,
    timeout: float = TIMEOUT,
) -> Observation:
    """Run a training; `act` is called with the processes of its ranks after step `act_at`."""
    settings = write_settings(training, folder)
    events = Path(training.events)
    events.unlink(missing_ok=True)
    log = folder / "output.log"
    seen, started = Observation(), time.time()
    environment = os.environ | ENVIRONMENT
    with log.open("w") as output:
        process = subprocess.Popen(
            library.command(training.kind, settings, training.ranks),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,  # some libraries write to it
            start_new_session=True,
        )
        while process.poll() is None:
            time.sleep(POLL)
            _read_events(events, started, seen)
            ranks = _ranks(process.pid)
            seen.peak_mib = max([seen.peak_mib, *map(_peak_mib, ranks.values())])
            if act is not None and seen.acted_at is None and ranks and seen.last_step >= act_at:
                act(ranks)
                seen.acted_at = time.time() - started
            if time.time() - started > timeout:
                break
        seen.exit_code = process.poll()
        _end(process.pid)
    seen.seconds = time.time() - started
    _read_events(events, started, seen)
    seen.tail = log.read_text(errors="replace").splitlines()[-200:]
    return seen


def _read_events(path: Path, started: float, seen: Observation) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    steps = [row for row in rows if row["event"] == "step"]
    seen.steps = [row["time"] - started for row in steps]
    seen.saves = [row["time"] - started for row in rows if row["event"] == "saved"]
    if steps:
        seen.first_step, seen.last_step = steps[0]["step"], steps[-1]["step"]


def _ranks(pid: int) -> dict[int, psutil.Process]:
    """The ranks of a training: processes below `pid` that have a RANK; the first of each."""
    ranks: dict[int, psutil.Process] = {}
    try:
        for child in psutil.Process(pid).children(recursive=True):
            rank = child.environ().get("RANK")
            if rank is not None:
                ranks.setdefault(int(rank), child)
    except psutil.Error:  # it has ended meanwhile
        pass
    return ranks


def _peak_mib(process: psutil.Process) -> float:
    """Peak of a rank's memory: what its GPU holds now if it uses one, otherwise its largest resident memory."""
    if on_gpu := _gpu_mib().get(process.pid):
        return on_gpu
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return max((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), default=0.0)
    except OSError:
        return 0.0


def _gpu_mib() -> dict[int, float]:
    """Memory on GPUs by process; looked up at most once a second."""
    now = int(time.time())
    if shutil.which("nvidia-smi") is None:
        return {}
    return _gpu_memory(now)


@lru_cache(maxsize=1)
def _gpu_memory(_second: int) -> dict[int, float]:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    values = (line.split(",") for line in lines)
    return {int(pid): float(mib) for pid, mib in values if mib.strip().replace(".", "").isdigit()}


def _end(pid: int) -> None:
    """End what a training has left running: its session, and, if it has not ended, ranks in sessions of their own."""
    left = [process for process in psutil.process_iter() if _session(process) == pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        left += psutil.Process(pid).children(recursive=True)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def load_or(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result stored at `path`, which is measured and stored first if there is none."""
    if not path.is_file():
        result = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(json.dumps(result, indent=1))
        path.with_suffix(".part").rename(path)
    result: dict[str, Any] = json.loads(path.read_text())
    return result
