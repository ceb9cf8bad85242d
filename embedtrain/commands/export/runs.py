"""Opens the runs whose checkpoints are exported."""

from dataclasses import dataclass, replace
from pathlib import Path

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.step_directory import Checkpoint, find_checkpoint
from embedtrain.commands.export.options import ExportOptions
from embedtrain.config.compose import load_recipe
from embedtrain.config.recipe import Recipe
from embedtrain.errors import ConfigError
from embedtrain.models.hub import split_revision
from embedtrain.models.security import require_no_links


@dataclass(frozen=True)
class ExportedRun:
    """A run and the checkpoint to export."""

    run_dir: RunDirectory
    recipe: Recipe
    checkpoint: Checkpoint
    kind: str  # of its tensors that are exported


def open_run(path: str, options: ExportOptions) -> ExportedRun:
    """The run at a path and its step `options.step`.

    Raises ConfigError if Python code in the run is not permitted, CheckpointError if a file is damaged or there is no
    such step.
    """
    run_dir = RunDirectory(Path(path))
    recipe = load_recipe(run_dir.recipe)
    if recipe.model.trust_remote_code and not options.trust_remote_code:
        raise ConfigError(
            f"{run_dir.recipe} has model.trust_remote_code: true, but a file does not grant this permission: if you "
            f"trust the Python in {run_dir.architecture}, write trust_remote_code=true"
        )
    # The file names the base model of adapters as well, and does not make its code trusted. Nor that of a tokenizer.
    trusted = options.trust_remote_code and options.base is not None
    if options.base is not None:
        name, revision = split_revision(options.base)
        recipe.model = replace(recipe.model, path=name, revision=revision)
    if trusted:
        recipe.model = replace(recipe.model, tokenizer=None, tokenizer_revision=None)
    recipe.model.trust_remote_code = trusted
    require_no_links(run_dir.architecture)
    run_dir.require_intact()
    checkpoint = find_checkpoint(run_dir.checkpoints, options.step)
    return ExportedRun(run_dir, recipe, checkpoint, checkpoint.weights_kind(options.weights_of))
