"""How long a checkpoint stops training: the call of `save`, and the steps while it is written."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.comparison import make_step_context, prefetched
from benchmarks.gpu.models import RandomTexts, Sized, load, saved, sized_named
from benchmarks.measure import markdown
from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.config.recipe import CheckpointConfig
from embedtrain.distributed.world import World, joined_world
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.step import StepContext, train_step

TITLE = "The stall of a checkpoint, with AdamW's moments"
MODELS = ("XLM-R-large", "Qwen3-0.6B")
STEPS, SAVES = 10, 3
HEADER = ("model", "GB", "asynchronous", "a step, s", "first save, s", "later saves, s", "a step after a save, s",
          "the last save is written after, s")  # fmt: skip


def measure(_: str, *, small: bool = False) -> str:
    with joined_world() as world:
        cells = [row for name in MODELS for row in rows(sized_named(name, small=small), world, 1 if small else STEPS)]
    return markdown(HEADER, cells)


def rows(sized: Sized, world: World, steps: int) -> list[list[str]]:
    """The rows of a model, with asynchronous checkpoints and without."""
    with saved(sized, world.device) as folder:
        loaded = load(folder, world)
    context = make_step_context(loaded, world)
    texts = RandomTexts(sized.pairs, seed=0).batch()
    batch = make_rank_batch(texts, world.rank, world.size, loaded.tokenizer, ChunkOptions(sized.chunk_tokens, 10**9))
    batch = prefetched(batch, context, loaded)

    def step() -> float:
        start = time.perf_counter()
        train_step(context, batch)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return time.perf_counter() - start

    for _ in range(2):
        step()
    plain = statistics.median(step() for _ in range(steps))
    found = []
    for asynchronous in (False, True):
        with TemporaryDirectory(prefix="embedtrain-bench-") as root:
            found.append(
                [sized.name, *_saves(context, Path(root), asynchronous, plain, lambda: [step() for _ in range(steps)])]
            )
    context.wait_for_staging = lambda: None
    return found


def _saves(
    context: StepContext, root: Path, asynchronous: bool, plain: float, run_steps: Callable[[], list[float]]
) -> list[str]:
    config = CheckpointConfig(asynchronous=asynchronous, keep=1)
    seconds, after = list[float](), list[float]()
    with Checkpointer(root, config, context.world, metadata={}, log=lambda _: None) as checkpoints:
        context.wait_for_staging = checkpoints.wait_for_staging
        for number in range(1, SAVES + 1):
            start = time.perf_counter()
            checkpoints.save(context.module, context.optimizer, {"step": number})
            seconds.append(time.perf_counter() - start)
            after += run_steps()
        start = time.perf_counter()
        checkpoints.wait()
        written = time.perf_counter() - start
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return [
        f"{size / 1e9:.2f}",
        str(asynchronous).lower(),
        f"{plain:.3f}",
        f"{seconds[0]:.3f}",
        f"{statistics.median(seconds[1:]):.3f}",
        f"{statistics.median(after):.3f}",
        f"{written:.2f}",
    ]
