"""`python -m embedtrain.export run=runs/NAME step=latest to=DIR`: any checkpoint to a model directory."""

from embedtrain.config.compose import compose_export
from embedtrain.config.door_options import ExportOptions
from embedtrain.door import enter
from embedtrain.errors import ConfigError


def act(options: ExportOptions) -> None:
    """Read a checkpoint in one process, write the directory, reopen it and compare."""
    from pathlib import Path

    from embedtrain.checkpoint.card import model_card
    from embedtrain.checkpoint.export import (
        export_dtype,
        plain_vectors,
        plan_export,
        require_replaceable,
        stored_encoder,
        stored_pieces,
        tolerance_of,
    )
    from embedtrain.checkpoint.folder import choose_step
    from embedtrain.checkpoint.snapshot import WEIGHTS
    from embedtrain.config.compose import load_recipe, to_plain
    from embedtrain.config.schema import ModelConfig
    from embedtrain.data.tokens import TextTokenizer
    from embedtrain.models.source import open_source
    from embedtrain.models.tokenizer import load_tokenizer, text_length
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.summary import figures_at
    from embedtrain.training.model import quiet_libraries
    from embedtrain.training.rundir import RunDirectory

    quiet_libraries()
    console = Console()
    run_dir = RunDirectory(Path(options.run))
    recipe = load_recipe(run_dir.recipe)
    trusted = options.trust_remote_code
    if recipe.model.trust_remote_code and not trusted:
        raise ConfigError(
            f"{run_dir.recipe} says model.trust_remote_code: true, and a file does not decide that here: where you trust "
            f"the Python in {run_dir.architecture}, write trust_remote_code=true"
        )
    folder = choose_step(run_dir.checkpoints, options.step)
    to = require_replaceable(Path(options.to) if options.to else run_dir.model, run_dir.path)
    source = open_source(ModelConfig(path=str(run_dir.architecture), trust_remote_code=trusted))
    loaded = load_tokenizer(source)
    tokenizer = TextTokenizer(loaded, text_length(source, loaded))
    console.note(f"{folder.path}: step {folder.step}, {folder.manifest['layout']} layout")
    with folder.tensors(WEIGHTS) as stored:
        with console.phase("encoding probe texts with the checkpoint's weights"):
            expected = plain_vectors(stored_encoder(source, stored), tokenizer)
        dtype = export_dtype(options.dtype or recipe.export.dtype, source)
        specs, pieces = stored_pieces(stored)
        export = plan_export(to, run_dir.architecture, specs, dtype)
        with console.phase("writing the directory"):
            export.begin()
            export.write(pieces, main=True)
    with console.phase("reopening it with sentence-transformers"):
        exported = export.finish(
            model_card(
                to_plain(recipe),
                figures_at(run_dir.path, folder.step),
                step=folder.step,
                dimension=expected.shape[1],
                max_length=tokenizer.max_length,
                prompts=source.prompts,
            ),
            expected=expected,
            tolerance=tolerance_of(dtype, exact_encoder=True),
            trust_remote_code=trusted,
        )
    console.note(f"model: {exported.directory} ({str(dtype).removeprefix('torch.')}, vectors equal the encoder's)")


if __name__ == "__main__":
    enter(compose_export, act)
