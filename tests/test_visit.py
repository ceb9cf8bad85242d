"""The visit to a GPU: it ends in time, survives processes that die, continues, and its parts run on tiny models."""

import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.visit import __main__ as visit
from benchmarks.gpu.visit import worker
from benchmarks.gpu.visit.entries import Entry, Skipped, Visit
from benchmarks.gpu.visit.record import DONE, FAILED, SKIPPED, Record
from embedtrain.distributed.world import World
from tests.conftest import ROOT

# Parts whose entries take a second or two each on the pretended device.
QUICK = ("search",)

# A process of a part without torch. The entries that it measures behave as their names say.
PROCESS = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.visit.record import DONE, STARTED, Record
part, path, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
if not sys.stdin.readline().strip():
    sys.exit()
record = Record(path)
left = [name for name in names if record.last().get((part, name), {}).get("state", "due") == "due"]
record.announce(part, left)
for name in left:
    record.add(part, name, STARTED, limit=0.3 if name == "hangs" else 60)
    if name == "dies":
        os._exit(11)
    if name in ("hangs", "lasts"):
        time.sleep(60)
    record.add(part, name, DONE, values={"n": 1}, seconds=0.1)
"""


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Entries by part; the parts that are given some are the visit's."""
    names: dict[str, list[str]] = {}
    monkeypatch.setattr(visit, "PARTS", {part: visit.Part(title=part, budget=budget) for part, budget in PARTS.items()})
    monkeypatch.setattr(visit, "SECONDS", sum(PARTS.values()))
    monkeypatch.setattr(visit, "RESTART_SECONDS", 0.5)
    monkeypatch.setattr(
        visit,
        "command_of",
        lambda part, _: [sys.executable, "-c", PROCESS, part, str(tmp_path / "record.jsonl"), *names.get(part, ())],
    )
    return names


PARTS = {"one": 6.0, "two": 6.0}


def states(folder: Path) -> dict[str, str]:
    return {entry: row["state"] for (_, entry), row in Record(folder / "record.jsonl").last().items()}


def run(folder: Path, *more: str) -> int:
    return visit.main(["--folder", str(folder), *more])


def test_entries_that_die_or_hang_do_not_stop_the_others(entries, tmp_path, capfd):
    entries |= {"one": ["fine", "dies", "hangs", "last"], "two": ["second"]}
    assert run(tmp_path) == 1
    assert states(tmp_path) == {"fine": DONE, "dies": FAILED, "hangs": FAILED, "last": DONE, "second": DONE}
    page = capfd.readouterr().out
    assert page.endswith((tmp_path / "report.md").read_text() + "\n")
    assert "dies: **failed**, its process ended with exit code 11" in page
    assert "hangs: **failed**, it took more than its 0.3 s" in page


def test_it_ends_in_time_and_the_next_one_continues(entries, tmp_path, capfd):
    entries |= {"one": ["fine", "lasts", "waiting"], "two": ["second"]}
    started = time.monotonic()
    run(tmp_path, "--seconds", "6")
    assert time.monotonic() - started < 40  # an entry lasts 60 s
    assert states(tmp_path) == {"fine": DONE, "lasts": FAILED, "waiting": "due", "second": DONE}
    assert "lasts: **failed**, the time of its part was over" in capfd.readouterr().out
    assert "not reached: waiting" in (tmp_path / "report.md").read_text()
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write('{"part": "two", "entry": "se')  # as a killed process leaves it
        file.write("\n")
    entries["two"].append("new")
    run(tmp_path)
    lines = (tmp_path / "record.jsonl").read_text()
    assert states(tmp_path) == {"fine": DONE, "lasts": FAILED, "waiting": DONE, "second": DONE, "new": DONE}
    assert lines.count('"entry": "fine", "state": "started"') == 1


@pytest.mark.parametrize("begins", [0, 1])
def test_a_visit_that_is_interrupted_leaves_no_process(entries, tmp_path, monkeypatch, begins):
    """Also not that of a part which has been started again."""
    entries |= {"one": ["dies", "lasts"], "two": ["second"]}
    workers: list[visit.Worker] = []

    class Recorded(visit.Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            workers.append(self)

        def another(self) -> visit.Worker:
            return Recorded(self.part, *self._arguments)

    wait, calls = visit.wait, []

    def interrupted(worker: visit.Worker, *arguments: Any) -> str | None:
        calls.append(worker.process)
        if len(calls) <= begins:
            return wait(worker, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(visit, "Worker", Recorded)
    monkeypatch.setattr(visit, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert len(workers) == 2 + begins
    assert all(worker.process.poll() is not None for worker in workers)


def test_a_report_is_printed_without_measuring(entries, tmp_path, capfd):
    Record(tmp_path / "record.jsonl").add("one", "fast", DONE, values={"s a step": "0.1 | 2"}, seconds=1.0)
    assert run(tmp_path, "--report") == 0
    assert "| fast | 0.1 / 2 | 1.0 |" in capfd.readouterr().out


def measure_some(world: World, folder: Path) -> tuple[int, dict[str, str]]:
    """Entries that return, raise and do not apply, twice."""
    calls: list[str] = []

    def entry(name: str, error: Exception | None = None, **more: Any) -> Entry:
        def measure(_world: World, _visit: Visit) -> dict[str, object]:
            calls.append(name)
            if error is not None:
                raise error
            return {"n": 1.0}

        return Entry(name=name, measure=measure, **more)

    some = [entry("fails", AssertionError()), entry("does not apply", Skipped("no such option")), entry("works"),
            entry("again", varied=True)]  # fmt: skip
    record = Record(folder / "record.jsonl")
    shared = Visit(small=True, folder=folder, deadline=time.monotonic() + 60)
    for _ in range(2):
        assert worker.measure(some, "part", record, world, shared) == 0
    assert calls == ["fails", "does not apply", "works", "fails", "does not apply"]
    late = Visit(small=True, folder=folder, deadline=time.monotonic())
    assert worker.measure(some, "part", record, world, late) == 0
    assert len(calls) == 5  # the visit has been killed, which would have ended this process
    some.insert(0, entry("breaks", torch.AcceleratorError("CUDA error: an illegal memory access was encountered")))
    return worker.measure(some, "part", record, world, shared), {
        name: row["state"] + row.get("message", "") for (_, name), row in record.last().items()
    }


def test_a_worker_records_what_fails_and_what_does_not_apply(tmp_path):
    code, found = measure_some(World(0, 1, 0, 1, torch.device("cpu")), tmp_path)
    assert code == worker.BROKEN_DEVICE
    assert found["works"] == DONE
    assert found["does not apply"] in ("due", f"{SKIPPED}no such option")
    assert found["breaks"].startswith(FAILED)


def small_part(world: World, part: str, folder: Path) -> dict[str, str]:
    """The entries of a part with tiny models: problems by entry."""
    entries = [entry for entry in import_module(f"benchmarks.gpu.visit.{part}").ENTRIES if not entry.unpretended]
    record = Record(folder / "record.jsonl")
    shared = Visit(small=True, folder=folder, deadline=time.monotonic() + 600)
    with shared.kept:
        worker.measure(entries, part, record, world, shared)
    assert len(record.last()) > 0
    return {entry: row["message"] for (_, entry), row in record.last().items() if row["state"] == FAILED}


def each_part(quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(part, marks=[] if part in quick else pytest.mark.slow) for part in visit.PARTS]


@pytest.mark.parametrize("part", each_part(QUICK))
def test_parts_on_the_pretended_device(cuda_ranks: Callable[..., Any], tmp_path: Path, part: str) -> None:
    assert cuda_ranks(1, small_part, part, tmp_path, timeout=600) == [{}]


@pytest.mark.slow
def test_a_visit_of_tiny_models(tmp_path: Path) -> None:
    """In the processes of a real visit, on the CPU."""
    command = [sys.executable, "-m", "benchmarks.gpu.visit", "--small", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    page = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, page + (tmp_path / "log.txt").read_text()[-3000:]
    assert "failed" not in page
    assert all(f"({part})" in page for part in visit.PARTS)
