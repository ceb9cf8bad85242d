"""Runs of XLM-R-base: killed while it writes a checkpoint, resumed, exported; memory against the plan; equal bits."""

import re
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import plan
from benchmarks.gpu.models import sized_named
from benchmarks.gpu.visit.checks import in_process
from benchmarks.gpu.visit.entries import Entry, Values, Visit
from benchmarks.inputs import QUICKSTART
from benchmarks.measure import require
from embedtrain.distributed.world import World
from tests.gpu import test_saving
from tests.runs import losses, metric_rows, write_run_inputs

EVERY, KILLED_AT, STEPS = 5, 10, 20
# Relative, of losses of the same steps in two processes: sums of a GPU vary in their order, and bf16 has 8 bits.
LOSS_TOLERANCE = 2e-2


def killed_and_resumed(world: World, visit: Visit) -> Values:
    """A run that is killed while it writes the second checkpoint, and resumed to its end."""
    output = visit.folder / "run"
    command = _command(visit, output, world, "parallel.compile=false")
    log = visit.folder / "killed.log"
    killed = _kill_while_saving(command, output, log)
    before = losses(output)
    started = time.monotonic()
    resumed = _finished(command)
    seconds = time.monotonic() - started
    after = losses(output)
    (step,) = re.findall(r"resuming from .*?step-0*(\d+)", resumed) or [""]
    require(step != "", f"the run did not resume: {resumed[-500:]}")
    common = sorted(before.keys() & after.keys())
    difference = max(abs(after[n] - before[n]) / abs(before[n]) for n in common)
    require(difference <= LOSS_TOLERANCE, f"losses of steps {common} differ by {difference} after resuming")
    return {
        "killed while": killed,
        "resumed from step": step,
        "largest difference of losses": f"{difference:.1e}",
        **_figures(output),
        "seconds of the resumed process": f"{seconds:.0f}",
    }


def with_defaults(world: World, visit: Visit) -> Values:
    """The same run with the default options of `parallel`, to its end."""
    output = visit.folder / "defaults"
    started = time.monotonic()
    _finished(_command(visit, output, world))
    return {**_figures(output), "seconds of the process": f"{time.monotonic() - started:.0f}"}


def _command(visit: Visit, output: Path, world: World, *options: str) -> list[str]:
    model = visit.model(sized_named("XLM-R-base", small=visit.small), world.device)
    arguments = (
        "name=visit", f"model.path={model}", "model.max_length=128", f"data.train=[{QUICKSTART / 'train-en.jsonl.gz'}]",
        f"evaluation.sets=[{QUICKSTART / 'dev-en'}]", "evaluation.every=10", "evaluation.at_start=false",
        f"train.steps={STEPS}", f"train.global_batch_size={8 if visit.small else 512}", "train.log_every=1",
        f"checkpoint.every={EVERY}", "checkpoint.keep=9", "tracking.report=false", f"output_dir={output}", *options,
    )  # fmt: skip
    return [sys.executable, "-m", "embedtrain", "train", *arguments]


def _kill_while_saving(command: list[str], output: Path, log: Path) -> str:
    """Start the run, and kill it as soon as it writes the checkpoint of step KILLED_AT; what it was doing."""
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            for path in (output / "checkpoints").glob("step-*"):
                number = re.match(r"step-0*(\d+)", path.name)
                if number is not None and int(number[1]) >= KILLED_AT:
                    process.kill()
                    return f"writing {path.name}" if path.suffix == ".tmp" else f"step {_last_step(output)}"
            time.sleep(0.001)
    raise RuntimeError(f"the run ended with exit code {process.returncode}: {log.read_text()[-2000:]}")


def _last_step(output: Path) -> int:
    with suppress(OSError, ValueError):
        return max((row["step"] for row in metric_rows(output)), default=0)
    return 0


def _finished(command: list[str]) -> str:
    """The output of a run that succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def _figures(output: Path) -> dict[str, object]:
    rows: list[dict[str, Any]] = metric_rows(output)
    steps = [row for row in rows if "loss" in row]
    require((output / "model" / "model.safetensors").is_file(), "the run did not export its model")
    metrics = [row for row in rows if "set" in row]
    return {
        "steps": steps[-1]["step"],
        "loss, first and last": f"{steps[0]['loss']:.3f}, {steps[-1]['loss']:.3f}",
        "nDCG@10 of dev-en at the end": f"{metrics[-1]['ndcg@10']:.3f}",
        "memory, GiB": f"{max(row['memory_gib'] for row in steps):.2f}",
        "real tokens / s, last step": f"{steps[-1]['tokens_per_s']:,.0f}",
        "waiting for data": f"{max(row.get('data_wait', 0.0) for row in steps[STEPS // 2 :]):.1%}",
    }


def memory(number: int, world: World, visit: Visit) -> Values:
    """Peak memory of training steps against the plan."""
    case = plan.tiny_case() if visit.small else plan.cases()[number]
    result = plan.compare_here(case, world)
    return {
        "model": f"{case.name}, {case.parallel.precision.value}",
        "layout": result.layout,
        "planned, GB": f"{result.planned / 1e9:.2f}",
        "measured, GB": f"{result.measured / 1e9:.2f}",
        "ratio": f"{result.planned / result.measured:.2f}",
    }


def equal_bits(world: World, visit: Visit) -> Values:
    """With parallel.deterministic=true, a resumed run has the bits of an uninterrupted one."""
    inputs = write_run_inputs(visit.subfolder("inputs"))
    test_saving.test_resumed_runs_equal_uninterrupted_ones(
        in_process(world), inputs, visit.subfolder("bits"), 1, "bf16"
    )
    return {}


def saved_under_load(offload: bool, world: World, visit: Visit) -> Values:
    """Checkpoints hold the weights of their step, though the device is busy and training goes on at once."""
    test_saving.save_under_load(world, visit.subfolder(f"under-load-{offload}"), offload, small=visit.small)
    return {}


ENTRIES = (
    Entry(name="killed while saving, and resumed", measure=killed_and_resumed, limit=75),
    *(
        Entry(
            name=f"weights of a checkpoint, {'in host memory' if offload else 'on the device'}",
            measure=partial(saved_under_load, offload),
            varied=offload,
        )
        for offload in (False, True)
    ),
    Entry(name="equal bits", measure=equal_bits),
    *(
        Entry(name=f"memory, case {number}", measure=partial(memory, number), varied=number > 0)
        for number in range(5)  # those of one rank
    ),
    Entry(name="with the default options", measure=with_defaults, varied=True),
)
