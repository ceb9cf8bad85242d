"""Training runs for tests: options of a small run, its inputs, and readers of what it writes.

ranks(2, run, *options(inputs, tmp_path, "train.steps=4"))      # inputs: the fixture `run_inputs`
losses(tmp_path)
"""

import contextlib
import io
import json
import pickle
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.world import World
from embedtrain.training.train import train
from tests.small import save_small, small_model, write_beir, write_rows

BASE = [
    "name=t", "model.pooling=mean", "train.global_batch_size=10", "train.log_every=1", "train.chunk_tokens=120",
    "parallel.strategy=fsdp", "parallel.precision=fp32", "optim.lr=1e-3", "loss.temperature=0.1",
    "export.check=false",  # exports have their own tests
    "evaluation.at_start=false",
    "tracking.report=false",  # reports have tests of their own too
]  # fmt: skip


def run(world: World, *arguments: str) -> str:
    """Train like the command, with BASE; the standard output of this rank."""
    return run_without_base(world, *BASE, *arguments)[0]


def run_without_base(world: World, *arguments: str) -> tuple[str, str]:
    """Train like the command; standard output and standard error of this rank."""
    (recipe,) = _compose(world, arguments)
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        train(recipe, world)
    return output.getvalue(), errors.getvalue()


def _compose(world: World, arguments: Sequence[str]) -> list[Recipe]:
    """`compose_recipes` on rank 0 only, which takes a third of a second; all ranks raise what it raises.

    The process that composes also notes which code the user names, so that with code all ranks compose.
    """
    if world.size == 1 or any(re.search(r"\w:\w", argument) for argument in arguments):
        return compose_recipes(list(arguments))
    store = _get_default_store()
    key = f"composed-{store.add(f'compositions-{world.rank}', 1)}"
    if world.is_main:
        try:
            composed: Any = compose_recipes(list(arguments))
        except Exception as error:
            composed = error
        store.set(key, pickle.dumps((arguments, composed)))
    # Only processes of this test write to the store, a file of its own: no pickle of others is read.
    arguments_of_main, composed = pickle.loads(store.get(key))
    if arguments_of_main != arguments:
        return compose_recipes(list(arguments))
    if isinstance(composed, Exception):
        raise composed
    return composed


def write_run_inputs(folder: Path) -> Path:
    """36 rows, an evaluation set of 20 queries, and models without and with dropout."""
    write_rows(folder / "train.jsonl", 36)
    write_beir(folder / "dev", 20)
    save_small(small_model("xlm-roberta"), folder / "model")
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "dropout")
    return folder


def options(inputs: Path, output_dir: Path, *more: str, model: str = "model") -> tuple[str, ...]:
    """Options of a run on the files of `write_run_inputs`."""
    return (
        f"model.path={inputs / model}", f"data.train=[{inputs / 'train.jsonl'}]",
        f"evaluation.sets=[{inputs / 'dev'}]", f"output_dir={output_dir}", *more,
    )  # fmt: skip


def metric_rows(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir: Path) -> dict[int, float]:
    """Step -> loss."""
    return {row["step"]: row["loss"] for row in metric_rows(output_dir) if "loss" in row}


def evaluation_metrics(output_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics of the evaluation set."""
    return {
        row["step"]: {key: value for key, value in row.items() if "@" in key}
        for row in metric_rows(output_dir)
        if "set" in row
    }


def rewind_run(output_dir: Path, to: Path, step: int) -> Path:
    """A copy of a run as it was after `step`, without later checkpoints and the export."""
    shutil.copytree(output_dir, to)
    for path in (to / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(to / "model")
    return to


def exported_weights(output_dir: Path) -> bytes:
    return (output_dir / "model" / "model.safetensors").read_bytes()
