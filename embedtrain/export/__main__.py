"""`python -m embedtrain.export run=runs/NAME step=latest output_dir=DIR`: convert a checkpoint to a model directory."""

from pathlib import Path

from embedtrain.cli import run_command
from embedtrain.config.checks import check_export
from embedtrain.config.paths import require_run
from embedtrain.config.recipe import ADAPTER
from embedtrain.config.validation import written
from embedtrain.errors import ConfigError
from embedtrain.export.options import ExportOptions, compose_export, requested_export


def compose(arguments: list[str]) -> ExportOptions:
    """The options, checked, of a run that exists."""
    options = compose_export(arguments)
    require_run(options.run)
    return options


def main(options: ExportOptions) -> Path:
    """Read a checkpoint in one process, write the model directory, reopen and verify it; returns the directory."""
    from embedtrain.checkpoint.export.hub import require_export_support, upload_model
    from embedtrain.checkpoint.export.replacement import require_replaceable
    from embedtrain.checkpoint.run_directory import RunDirectory
    from embedtrain.checkpoint.step_directory import find_checkpoint
    from embedtrain.config.compose import load_recipe
    from embedtrain.export.convert import export_checkpoint
    from embedtrain.loading.load import quiet_libraries
    from embedtrain.models.security import require_no_links
    from embedtrain.tracking.console import Console

    quiet_libraries()
    console = Console()
    run_dir = RunDirectory(Path(options.run))
    recipe = load_recipe(run_dir.recipe)
    trusted = options.trust_remote_code
    if recipe.model.trust_remote_code and not trusted:
        raise ConfigError(
            f"{run_dir.recipe} has model.trust_remote_code: true, but a file does not grant this permission: if you "
            f"trust the Python in {run_dir.architecture}, write trust_remote_code=true"
        )
    require_no_links(run_dir.architecture)
    run_dir.require_intact()
    config = requested_export(options, recipe.export)
    check_export(config)
    if ADAPTER in config.formats and not recipe.model.lora.on:
        raise ConfigError(
            f"formats={written(config.formats)}: the run has no adapters (model.lora.rank); leave {ADAPTER} out"
        )
    require_export_support(config)
    checkpoint = find_checkpoint(run_dir.checkpoints, options.step)
    output_dir = require_replaceable(Path(options.output_dir) if options.output_dir else run_dir.model, run_dir.path)
    console.note(f"{checkpoint.path}: step {checkpoint.step}, {checkpoint.manifest.layout.value} layout")
    result = export_checkpoint(
        run_dir, recipe, checkpoint, output_dir, config, trust_remote_code=trusted, console=console
    )
    if result.difference is None:
        console.warn("check=false: names and shapes are correct, but the embeddings were not compared")
    console.note(f"model: {result.directory} ({result.describe()})")
    if config.push_to_hub is not None:
        with console.phase(f"uploading to {config.push_to_hub}"):
            address = upload_model(result.directory, config.push_to_hub, private=config.private, step=checkpoint.step)
        console.note(f"uploaded: {address}")
    return result.directory


if __name__ == "__main__":
    run_command(compose, main)
