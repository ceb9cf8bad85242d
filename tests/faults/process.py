"""One rank as a process, like those of torchrun, but forked from a process that has imported everything."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

import embedtrain.__main__
import embedtrain.commands.train
from embedtrain.config.recipe import Recipe
from embedtrain.pipeline.types import Pipeline

Hook = Callable[[int], None]


def run_rank(
    environment: Mapping[str, str], recipes: Sequence[Recipe] | Pipeline, folder: Path, log: Path, hook: Hook | None
):
    """Call `hook(rank)`, then run the command in `folder` with its output in `log`.

    The recipes, or a pipeline, are composed once for all runs with the same options, because that takes as long as ten
    steps.
    """
    os.setsid()
    os.environ.update(environment)
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.argv = ["embedtrain"]
    embedtrain.commands.train.compose = lambda _: recipes
    _refuse_pickles()
    if hook is not None:
        hook(int(environment["RANK"]))
    embedtrain.__main__.main()


def _refuse_pickles() -> None:
    """End this process if it unpickles an object: a message of another rank, or a value in the store, could be one."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            raise AssertionError(f"a rank unpickles {arguments}")

    def refuse_message(*_: object) -> None:
        raise AssertionError("a rank unpickles a message")  # even of plain values, which look up no class

    sys.addaudithook(refuse)
    dist.distributed_c10d._tensor_to_object = refuse_message
