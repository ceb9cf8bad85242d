"""What a killed rank, another number of ranks and a full disk do to a training of each library.

Every training is that of an undisturbed run: the same rows, seed and batches. A disturbed run that ends with the same
weights has lost nothing.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from benchmarks.measure import markdown
from benchmarks.rivals.launch import Observation, load_or, observe
from benchmarks.rivals.libraries import KINDS, Library
from benchmarks.rivals.scripts.common import Training
from benchmarks.rivals.settings import Settings
from benchmarks.rivals.trainings import Comparison

STEPS, SAVE_EVERY, DISTURBED_AT = 12, 4, 6
LIMIT = 100  # seconds after which a training that does not end is ended
SEED = 1
# "RuntimeError: ..." or "error: ...", also behind torchrun's "[rank0]: "
_ERROR = re.compile(r"(?:\[\w+\]:)?\s*((?:[\w.]*(?:Error|Exception)|error): .*)")


def measure(settings: Settings) -> str:
    """The tables of all libraries, each with the first kind of model that it trains."""
    results = []
    for library in _libraries(settings):
        kind = next(kind for kind in KINDS if kind in library.scripts and kind in settings.kinds)
        comparison = Comparison(settings, kind)
        path = settings.output / "results" / f"failures-{library.name}.json"
        results.append((library.name, load_or(path, lambda c=comparison, lib=library: observe_failures(c, lib))))
    return "\n\n".join(_tables(results))


def _libraries(settings: Settings) -> list[Library]:
    found = {library.name: library for kind in settings.kinds for library in Comparison(settings, kind).installed}
    return list(found.values())


def observe_failures(comparison: Comparison, library: Library) -> dict[str, Any]:
    """Run a training undisturbed, killed and resumed, resumed on one rank, and with a disk that becomes full."""
    print(f"{comparison.kind} {library.name} failures ...", flush=True)
    base = comparison.folder(library, "failures")
    shutil.rmtree(base, ignore_errors=True)
    rows = STEPS * comparison.settings.shapes[comparison.kind].global_batch

    def training(name: str, **changes: Any) -> Training:
        # fp32, so that the order of sums is all that differs between numbers of ranks
        common = {"steps": STEPS, "save_every": SAVE_EVERY, "precision": "fp32"}
        planned = comparison.training(library, f"failures/{name}", seed=SEED, rows=rows, **common)
        return dataclasses.replace(planned, **changes)

    def run(name: str, planned: Training, **action: Any) -> dict[str, Any]:
        seen = observe(library, planned, base / name, timeout=LIMIT, **action)
        return dataclasses.asdict(seen) | {"weights": _weights_change(planned, base / "undisturbed")}

    results = {"undisturbed": run("undisturbed", training("undisturbed"))}
    if results["undisturbed"]["exit_code"] != 0:
        return results
    results["killed"] = run("killed", training("killed"), act_at=DISTURBED_AT, act=_kill_last_rank)
    shutil.copytree(base / "killed" / "run", base / "elastic" / "run", symlinks=True)
    results["resumed"] = run("resumed", training("killed", resume=True))
    elastic = training("elastic", resume=True, ranks=1)
    results["elastic"] = run("elastic", elastic)
    if os.geteuid() == 0:
        full = training("full")
        with small_disk(Path(full.output)) as disk:
            results["full"] = run("full", full, act_at=DISTURBED_AT, act=lambda _: _fill(disk))
            (disk / "ballast").unlink(missing_ok=True)
            resumed = dataclasses.replace(full, resume=True)
            results["after full"] = run("after full", resumed)
            if results["after full"]["exit_code"] != 0:
                _remove_second_checkpoint(Path(full.output))
                results["from the first"] = run("from the first", resumed)
    shutil.rmtree(base)
    return results


def _kill_last_rank(ranks: Mapping[int, psutil.Process]) -> None:
    ranks[max(ranks)].send_signal(signal.SIGKILL)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system in memory at `path`."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4G", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _fill(disk: Path) -> None:
    """Take all space of the disk, as another process may."""
    with (disk / "ballast").open("wb") as file:
        while (free := shutil.disk_usage(disk).free) > 2**20:
            with contextlib.suppress(OSError):  # the training has written meanwhile
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free - 2**20)


def _remove_second_checkpoint(run: Path) -> None:
    """Leave the checkpoint that is complete, as a person would who has seen the other fail."""
    for path in sorted(run.rglob(f"*[-_]{2 * SAVE_EVERY}")):
        shutil.rmtree(path)


def _weights_change(training: Training, undisturbed: Path) -> float | None:
    """How far the trained weights are from those of the undisturbed run, relative to what training changed.

    0 for equal bits; None without a model.
    """
    files = [_weight_file(Path(training.trained)), _weight_file(undisturbed / "run" / "model")]
    if None in files:
        return None
    ours, expected = (_tensors(path) for path in files)
    start = _tensors(_weight_file(Path(training.model)))
    names = sorted(name for name in ours if name in start and start[name].is_floating_point())
    difference = torch.cat([(ours[name] - expected[name]).double().flatten() for name in names])
    change = torch.cat([(expected[name] - start[name]).double().flatten() for name in names])
    return float(difference.norm() / change.norm())


def _weight_file(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.safetensors"))), None) or next(
        iter(sorted(folder.glob("0_*/*.safetensors"))), None
    )


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors without the prefix of a wrapped model."""
    return {name.removeprefix("bert.").removeprefix("model."): value for name, value in load_file(path).items()}


def _tables(results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    kills, disks, costs = [], [], []
    for name, runs in results:
        seen = {key: Observation(**{k: v for k, v in run.items() if k != "weights"}) for key, run in runs.items()}
        if not seen["undisturbed"].finished:
            kills.append([name, f"an undisturbed run with checkpoints {_full(seen['undisturbed'])}", *["-"] * 5])
            continue
        killed, saving = seen["killed"], seen["undisturbed"]
        ended = f"{killed.seconds - (killed.acted_at or 0):.0f} s"
        kills.append(
            [
                name,
                ended if killed.exit_code is not None else f"not within {LIMIT} s",
                *_resumed(runs["resumed"], seen["resumed"]),
                f"{seen['resumed'].steps[0]:.0f} s" if seen["resumed"].steps else "-",
                *_resumed(runs["elastic"], seen["elastic"]),
            ]
        )
        if "full" in runs:
            second = "from the first" in runs
            first = _resumed(runs["from the first"], seen["from the first"]) if second else ("-", "-")
            disks.append([name, _full(seen["full"]), *_resumed(runs["after full"], seen["after full"]), *first])
        costs.append([name, f"{_stall(saving):.2f} s", f"{saving.step_seconds:.2f} s", f"{saving.steps[0]:.0f} s"])
    resumed = ["resumes at step", "its weights differ by"]
    kill_header = [
        "library",
        "all ranks have ended after",
        *resumed,
        "first step after",
        "on 1 rank: at step",
        resumed[1],
    ]
    cost_header = ["library", "a checkpoint delays a step by", "a step takes", "first step after"]
    removed = "without the incomplete checkpoint: at step"
    disk_header = ["library", "what is printed", *resumed, removed, resumed[1]]
    tables = [(kill_header, kills), (disk_header, disks), (cost_header, costs)]
    return [markdown(header, lines) for header, lines in tables if lines]


def _resumed(run: dict[str, Any], seen: Observation) -> tuple[str, str]:
    if not seen.steps:
        return f"fails: `{_message(seen)}`", "-"
    at = f"{seen.first_step}" if seen.first_step > 1 else "1 (from scratch)"
    if run["weights"] is None or not seen.finished:
        return at, f"fails: `{_message(seen)}`"
    return at, "bit-equal" if run["weights"] == 0 else f"{run['weights']:.0e} of the change"


def _full(seen: Observation) -> str:
    if seen.finished:
        return "ends as if nothing had happened"
    return f"`{_message(seen)}`" if seen.exit_code is not None else f"hangs for more than {LIMIT} s"


def _message(seen: Observation) -> str:
    """The last error of a rank, or a sentence that begins with "error:"; the last line if there is neither."""
    errors = [match[1] for line in seen.tail if (match := _ERROR.match(line)) and "ChildFailedError" not in line]
    message = (errors or seen.tail or ["no output"])[-1]
    return message[:160].replace("|", "\\|").replace("`", "'")


def _stall(seen: Observation) -> float:
    """Extra time of the steps that follow a checkpoint, or end with it, beyond that of a step."""
    durations = [end - start for start, end in zip(seen.steps, seen.steps[1:], strict=False)]
    after = [durations[step - 1] for step in range(SAVE_EVERY, STEPS, SAVE_EVERY) if step - 1 < len(durations)]
    return sum(after) / max(1, len(after)) - seen.step_seconds
