"""`python -m embedtrain.export run=runs/NAME step=latest output_dir=DIR`: any checkpoint to a model directory."""

from embedtrain.cli import run_command
from embedtrain.config.checks import check_export
from embedtrain.errors import ConfigError
from embedtrain.export.options import ExportOptions, compose_export, requested_export


def act(options: ExportOptions) -> None:
    """Read a checkpoint in one process, write the directory, reopen it and compare."""
    from pathlib import Path

    from embedtrain.checkpoint.export.export import require_replaceable
    from embedtrain.checkpoint.export.hub import require_export_support, upload_model
    from embedtrain.checkpoint.run_directory import RunDirectory
    from embedtrain.checkpoint.step_directory import find_checkpoint
    from embedtrain.config.compose import load_recipe
    from embedtrain.export.offline import export_step
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
            f"{run_dir.recipe} says model.trust_remote_code: true, and a file does not decide that here: where you "
            f"trust the Python in {run_dir.architecture}, write trust_remote_code=true"
        )
    require_no_links(run_dir.architecture)
    asked = requested_export(options, recipe.export)
    check_export(asked)
    require_export_support(asked)
    folder = find_checkpoint(run_dir.checkpoints, options.step)
    to = require_replaceable(Path(options.output_dir) if options.output_dir else run_dir.model, run_dir.path)
    console.note(f"{folder.path}: step {folder.step}, {folder.manifest['layout']} layout")
    exported = export_step(run_dir, recipe, folder, to, asked, trust_remote_code=trusted, console=console)
    if exported.difference is None:
        console.warn("check=false: names and shapes are right, but nobody has compared the model with the encoder")
    console.note(f"model: {exported.directory} ({exported.told})")
    if asked.push_to_hub is not None:
        with console.phase(f"uploading to {asked.push_to_hub}"):
            address = upload_model(exported.directory, asked.push_to_hub, private=asked.private, step=folder.step)
        console.note(f"uploaded: {address}")


if __name__ == "__main__":
    run_command(compose_export, act)
