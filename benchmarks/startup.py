"""From a command to its first line and to the first training step, beside sentence-transformers' trainer."""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.inputs import MINILM
from benchmarks.measure import ROUNDS, markdown, require
from benchmarks.workloads import short_pairs

PAIRS = 16
TITLE = f"Start-up: --help, and a training of all-MiniLM-L6-v2 with {PAIRS} pairs in a batch"
HELP = ("embedtrain --help", "embedtrain train --help")


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds from the start of a command, and CPU seconds of all its processes until then."""

    wall: float
    cpu: float


def measure() -> str:
    """Run each command in every round, alternating which goes first; round 0 reads all files once."""
    with tempfile.TemporaryDirectory() as folder:
        commands = _commands(Path(folder))
        moments: dict[str, list[tuple[Moment, Moment]]] = {name: [] for name in commands}
        for round_number in range(ROUNDS + 1):
            names = list(commands)
            for position in range(len(names)):
                name = names[(position + round_number) % len(names)]
                last = "" if name in HELP else "step 1/1"
                moments[name].append(_run([*commands[name]], last, Path(folder) / f"{len(moments[name])} {name}"))
    header = [f"{moment}, {clock} s" for moment in ("first line", "first step, or end") for clock in ("wall", "CPU")]
    return markdown(["command", *header], [[name, *_cells(rounds[1:])] for name, rounds in moments.items()])


def _commands(folder: Path) -> dict[str, list[str]]:
    """The arguments of the interpreter; those of a training end with its output directory."""
    pairs = short_pairs().pairs(PAIRS)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"query": query, "pos": [text]}) + "\n" for query, text in pairs))
    ours = ["name=startup", f"model.path={MINILM}", f"data.train=[{data}]", "train.steps=1", "train.log_every=1"]
    train = ["-m", "embedtrain.cli.console", "train"]
    ours += [f"train.global_batch_size={PAIRS}"]
    return {
        HELP[0]: ["-m", "embedtrain.cli.console", "--help"],
        HELP[1]: [*train, "--help"],
        "embedtrain train, 1 rank": [*train, *ours, "output_dir="],
        "embedtrain train, 2 ranks": [*train, "--nproc-per-node", "2", *ours, "output_dir="],
        "SentenceTransformerTrainer": ["-m", "benchmarks.startup_theirs", MINILM, str(data), ""],
    }


def _run(arguments: list[str], last: str, output: Path) -> tuple[Moment, Moment]:
    """The moment of the first line, and that of the line that contains `last`, or of the end without `last`."""
    if last:
        arguments[-1] += str(output).replace(" ", "-").replace(",", "")
    start, before = time.perf_counter(), _cpu_of_ended()
    lines, moments = list[str](), list[Moment]()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not lines or (last and last in line):
                moments.append(Moment(time.perf_counter() - start, _cpu_of_running(process.pid)))
            lines.append(line)
    if not last:
        moments.append(Moment(time.perf_counter() - start, _cpu_of_ended() - before))
    require(process.returncode == 0 and len(moments) == 2, f"startup: {arguments} printed {''.join(lines)}")
    return moments[0], moments[1]


def _cpu_of_running(process: int) -> float:
    """CPU seconds of a process and its descendants."""
    parent = psutil.Process(process)
    return sum(sum(running.cpu_times()[:4]) for running in (parent, *parent.children(recursive=True)))


def _cpu_of_ended() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _cells(rounds: list[tuple[Moment, Moment]]) -> list[str]:
    """Medians."""
    columns = zip(*((first.wall, first.cpu, second.wall, second.cpu) for first, second in rounds), strict=True)
    return [f"{statistics.median(column):.2f}" for column in columns]
