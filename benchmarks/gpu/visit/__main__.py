"""A visit to a GPU that ends by itself: parts in the order of their worth, each with a budget, recorded as it goes.

python -m benchmarks.gpu.visit                   all that is not recorded yet, in at most 470 seconds
python -m benchmarks.gpu.visit steps losses      these parts
python -m benchmarks.gpu.visit --small           tiny models, on any device
python -m benchmarks.gpu.visit --report          print what is recorded

It needs no network. Each part has a process of its own, which is ended when its time is over, and started again if it
dies or an entry takes too long. A part that ends early leaves its time to the parts that follow.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

from benchmarks.gpu.visit.record import FAILED, Record, report
from benchmarks.gpu.visit.worker import BROKEN_DEVICE, work


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the visit, a module of this package.

    Attributes:
        budget: seconds, if earlier parts take theirs.
        environment: variables of its process.
    """

    title: str
    budget: float
    environment: dict[str, str] = field(default_factory=dict)


# cuBLAS reads its variable when it starts; a run with parallel.deterministic=true sets it.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
PARTS = {
    "checks": Part(title="Numbers of the device against the CPU", budget=65),
    "run": Part(title="A run that is killed and resumed, memory, equal bits", budget=90, environment=DETERMINISTIC),
    "steps": Part(title="Training steps", budget=125),
    "losses": Part(title="Losses and heads: extra memory and time", budget=60),
    "search": Part(title="Encoding and search", budget=60),
    "large": Part(title="Large models, checkpoints, memory accesses", budget=70),
}
SECONDS, SMALL_SECONDS = 470.0, 1880.0  # machines without a GPU have few cores
RESTART_SECONDS = 20.0  # a part with less time is not started again
POLL_SECONDS = 0.05
FOLDER, SMALL_FOLDER = Path("runs/visit"), Path("runs/visit-small")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.visit", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all, in this order")
    parser.add_argument("--small", action="store_true", help="tiny models, on any device")
    parser.add_argument("--report", action="store_true", help="print what is recorded, and measure nothing")
    parser.add_argument("--folder", type=Path, help=f"of record and report; default: {FOLDER}, or {SMALL_FOLDER}")
    parser.add_argument("--seconds", type=float, help=f"of the whole visit; default: {SECONDS:g}")
    parser.add_argument("--work", metavar="PART", help=argparse.SUPPRESS)  # the process of a part
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; available: {', '.join(PARTS)}")
    options.folder = options.folder or (SMALL_FOLDER if options.small else FOLDER)
    options.seconds = options.seconds or (SMALL_SECONDS if options.small else SECONDS)
    options.folder.mkdir(parents=True, exist_ok=True)
    record = Record(options.folder / "record.jsonl")
    if options.work:
        from benchmarks.gpu.__main__ import set_environment

        set_environment()
        return work(options.work, record.path, small=options.small)
    if not options.report:
        visit([name for name in PARTS if name in (options.parts or PARTS)], record, options)
    page = write_report(record)
    print(page)
    return 1 if any(row["state"] == FAILED for row in record.last().values()) else 0


def write_report(record: Record) -> str:
    """Write the page beside the record, and return it."""
    page = report(record, {name: part.title for name, part in PARTS.items()})
    (record.path.parent / "report.md").write_text(page)
    return page


def visit(names: Sequence[str], record: Record, options: argparse.Namespace) -> None:
    """Measure the parts one after the other."""
    began = time.monotonic()
    cache = tempfile.mkdtemp(prefix="embedtrain-visit-cache-")
    log = record.path.parent / "log.txt"
    end, following = began, Worker(names[0], options, log, cache) if names else None
    try:
        for number, name in enumerate(names):
            end += PARTS[name].budget * options.seconds / SECONDS
            deadline = min(end, began + options.seconds) if number + 1 < len(names) else began + options.seconds
            worker, following = following, None
            assert worker is not None
            with contextlib.ExitStack() as stack:
                stack.callback(worker.kill)
                if number + 1 < len(names):  # imports while this part computes
                    following = Worker(names[number + 1], options, log, cache)
                print(f"{name}: until second {deadline - began:.0f} of {options.seconds:.0f}", flush=True)
                measure_part(worker, record, deadline)
            write_report(record)
            print(f"{name}: ended in second {time.monotonic() - began:.0f}", flush=True)
    finally:
        if following is not None:
            following.kill()
        shutil.rmtree(cache, ignore_errors=True)


def command_of(part: str, options: argparse.Namespace) -> list[str]:
    """What the process of a part runs."""
    command = [sys.executable, "-m", "benchmarks.gpu.visit", "--work", part, "--folder", str(options.folder)]
    return [*command, *["--small"] * options.small]


class Worker:
    """The process of a part. It imports its modules at once, and begins when it is told to."""

    def __init__(self, part: str, options: argparse.Namespace, log: Path, cache: str) -> None:
        self.part, self._arguments, self._killed = part, (options, log, cache), False
        # A compiler that is killed leaves files that break the next process, so each has a folder of its own.
        folders = {"EMBEDTRAIN_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(dir=cache)}
        environment = os.environ | PARTS[part].environment | folders | {"PYTHONUNBUFFERED": "1"}
        with log.open("a") as file:
            self.process = subprocess.Popen(
                command_of(part, options),
                stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True, text=True,
            )  # fmt: skip

    def begin(self, seconds: float) -> None:
        """Let it measure for `seconds`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already, which its exit code shows
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.close()

    def another(self) -> "Worker":
        """A new process of the same part."""
        return Worker(self.part, *self._arguments)

    def kill(self) -> None:
        """End it with all that it has started, once: its id may be that of other processes later."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, SIGKILL)
            self.process.wait()


def measure_part(worker: Worker, record: Record, deadline: float) -> None:
    """Measure a part until the deadline, in new processes after one that has died or was ended."""
    while True:
        begun = time.monotonic()
        try:
            worker.begin(max(0.0, deadline - begun))
            reason = wait(worker, record, deadline)
        finally:  # Ctrl-C ends this process alone: that of the part has a session of its own
            worker.kill()
        running = record.running(worker.part)
        if running is not None:
            record.add(worker.part, running["entry"], FAILED, message=reason, seconds=time.monotonic() - begun)
        elif reason is not None and worker.process.returncode != BROKEN_DEVICE:
            record.add(worker.part, "its process", FAILED, message=reason, seconds=time.monotonic() - begun)
            return
        if reason is None or deadline - time.monotonic() < RESTART_SECONDS:
            return
        worker = worker.another()


def wait(worker: Worker, record: Record, deadline: float) -> str | None:
    """Wait for the end of a process, which is killed after the deadline or the limit of an entry; why, or None."""
    current, began = None, time.monotonic()
    while worker.process.poll() is None:
        now, running = time.monotonic(), record.running(worker.part)
        name = None if running is None else running["entry"]
        if name != current:
            current, began = name, now
        if now > deadline:
            worker.kill()
            began_any = bool(record.last(worker.part))
            return None if began_any and running is None else "the time of its part was over"
        if running is not None and now - began > running["limit"]:
            worker.kill()
            return f"it took more than its {running['limit']:g} s"
        time.sleep(POLL_SECONDS)
    code = worker.process.returncode
    return None if code == 0 else f"its process ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
