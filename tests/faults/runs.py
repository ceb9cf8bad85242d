"""Runs with faults: real ranks over gloo with the environment of torchrun, each a process that can be killed."""

import json
import multiprocessing as mp
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import Recipe
from embedtrain.pipeline.types import Pipeline
from tests.faults.process import Hook, run_rank
from tests.forked import fork_context, torchrun_environment

OPTIONS = [
    "name=t", "model.path=model", "model.pooling=mean", "data.train=[train.jsonl]", "train.global_batch_size=8",
    "train.log_every=1", "parallel.strategy=fsdp", "parallel.precision=fp32", "evaluation.sets=[dev,dev2]",
    "evaluation.at_start=false",
    "train.steps=12", "checkpoint.every=3", "evaluation.every=4", "checkpoint.best_metric=dev/ndcg@10", "optim.lr=1e-3",
]  # fmt: skip


@cache
def _recipes(*arguments: str) -> list[Recipe]:
    return compose_recipes(list(arguments))


@dataclass
class Run:
    """A command on several ranks."""

    processes: list[Any]
    log: Path
    output_dir: Path
    store: TCPStore | None

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def errors(self) -> list[str]:
        return re.findall(r"^error: .*$", self.text, re.MULTILINE)

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl."""
        try:
            return max((row["step"] for row in rows(self.output_dir)), default=0)
        except (OSError, ValueError):
            return 0

    def send(self, which: signal.Signals, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            os.kill(self.processes[rank].pid, which)

    def until(self, condition: Callable[["Run"], bool], timeout: float = 60.0) -> "Run":
        """Wait for a condition that holds before the run ends."""
        deadline = time.monotonic() + timeout
        while not condition(self):
            assert any(p.is_alive() for p in self.processes), f"the run ended too early:\n{self.text}"
            assert time.monotonic() < deadline, f"the condition never held:\n{self.text}"
            time.sleep(0.003)
        return self

    def wait(self, timeout: float = 90.0, *, launcher: bool = False) -> list[int]:
        """Exit codes after all ranks have ended: or were terminated as by a launcher."""
        deadline = time.monotonic() + timeout
        if launcher:
            while not any(process.exitcode for process in self.processes) and any(p.is_alive() for p in self.processes):
                time.sleep(0.01)
            for process in self.processes:
                if process.is_alive():
                    process.terminate()
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.end()
        assert None not in codes, f"a rank did not end within {timeout} s: {codes}\n{self.text}"
        return codes

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)


def start(
    folder: Path,
    output_dir: str,
    *more: str,
    size: int = 2,
    hook: Hook | None = None,
    agent: bool = True,
    forked: bool = True,
    pipeline: Pipeline | None = None,
) -> Run:
    """Start the command on `size` ranks.

    Args:
        folder: contains the inputs.
        output_dir: below `folder`.
        more: further options.
        size: number of ranks.
        hook: called in each rank's process before the command.
        agent: whether the store is hosted by a process that outlives all ranks, like torchrun's agent, instead of rank
            0.
        forked: whether ranks are forked from a process that has imported everything; CUDA needs new processes.
        pipeline: runs instead of a training; `more` has no effect.
    """
    store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)
    port = store.port
    if not agent:
        del store
        store = None
    log = folder / f"{output_dir.replace('/', '-')}-{time.monotonic_ns()}.log"
    processes = []
    context = fork_context() if forked else mp.get_context("spawn")
    for rank in range(size):
        environment = torchrun_environment(rank, size, port, agent=agent)
        composed = pipeline or _recipes(*OPTIONS, f"output_dir={output_dir}", *more)
        process = context.Process(target=run_rank, args=(environment, composed, folder, log, hook), daemon=True)
        process.start()
        processes.append(process)
    return Run(processes, log, folder / output_dir, store)


def finish(folder: Path, output_dir: str, *more: str, size: int = 2) -> Run:
    """Run the command to its end."""
    run = start(folder, output_dir, *more, size=size)
    assert run.wait() == [0] * size, run.text
    return run


def rows(output_dir: Path) -> list[dict[str, Any]]:
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def training_result(output_dir: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What must not depend on faults: final weights, and metrics without timings."""
    timing = {"memory_gib", "samples_per_s", "tokens_per_s", "data_wait", "model_tflops", "mfu", "communication"}
    metrics = [{key: value for key, value in row.items() if key not in timing} for row in rows(output_dir)]
    return (output_dir / "model" / "model.safetensors").read_bytes(), metrics
