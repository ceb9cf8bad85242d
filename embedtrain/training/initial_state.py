"""A new run that starts with the weights and the optimizer state of an earlier one: `train.init_from`."""

from pathlib import Path

import torch
from torch import nn

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.step_directory import (
    MANIFEST,
    Checkpoint,
    find_checkpoint,
    open_checkpoint,
    verify_checksums,
)
from embedtrain.config.checkpoint import CheckpointContents
from embedtrain.config.recipe import Recipe
from embedtrain.errors import CheckpointError
from embedtrain.formats.adapters import BASE_WEIGHTS
from embedtrain.tracking.console import Console
from embedtrain.training.resume import OPTIMIZER_NAME, read_state
from embedtrain.utils.files import expand_user


def start_from(
    path: str,
    checkpointer: Checkpointer,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    console: Console,
) -> None:
    """Read weights and optimizer from a checkpoint of another run, by names of parameters. A collective.

    Raises CheckpointError if it has no optimizer state, another optimizer, other frozen weights, or other parameters.
    """
    world, option = checkpointer.world, f"train.init_from={path}"
    location = ""
    with world.fail_together("opening train.init_from"):
        if world.is_main:
            location = str(_initial_checkpoint(path).path)
    location = world.broadcast(location)
    with world.fail_together("verifying train.init_from"):
        checkpoint = open_checkpoint(Path(location))
        verify_checksums(checkpoint, world.rank, world.size)
        manifest = checkpoint.manifest
        if manifest.contents is not CheckpointContents.all:
            raise CheckpointError(f"{option}: {checkpoint.path} has no optimizer state (checkpoint.contents=model)")
        before, name = str(manifest.identity.get(OPTIMIZER_NAME, "adamw")), recipe.optim.name.value
        if before != name:
            raise CheckpointError(f"{option} was trained with optim.name={before}, this run has optim.name={name}")
        if manifest.identity.get(BASE_WEIGHTS) != checkpointer.identity.get(BASE_WEIGHTS):
            raise CheckpointError(
                f"{option} trained adapters (model.lora) on other weights than those of model.path="
                f"{recipe.model.path}: start from the same base model"
            )
    try:
        checkpointer.resume(checkpoint, module, optimizer)
    except CheckpointError as error:
        raise CheckpointError(f"{option}: the model or its loss is another one: {error}") from None
    console.note(f"starting from the weights and the optimizer state of {checkpoint.path}")


def _initial_checkpoint(path: str) -> Checkpoint:
    """A checkpoint, or of a run that of the step that it has exported."""
    directory = expand_user(path)
    if (directory / MANIFEST).is_file():
        return open_checkpoint(directory)
    newest = find_checkpoint(directory / "checkpoints", "latest")
    best = read_state(newest).best_step if newest.manifest.recipe["checkpoint"]["best_metric"] is not None else None
    return newest if best is None else find_checkpoint(directory / "checkpoints", str(best))
