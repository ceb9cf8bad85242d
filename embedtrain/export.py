"""`python -m embedtrain.export run=runs/NAME step=latest to=DIR`: any checkpoint to a model directory."""

from embedtrain.config.compose import compose_export
from embedtrain.config.door_options import ExportOptions
from embedtrain.door import enter


def act(options: ExportOptions) -> None:
    """Read a checkpoint in one process, write the directory, reopen it and compare."""
    from pathlib import Path

    from embedtrain.checkpoint.card import model_card
    from embedtrain.checkpoint.export import (
        export_dtype,
        export_model,
        plain_vectors,
        require_replaceable,
        tolerance_of,
        whole_encoder,
    )
    from embedtrain.checkpoint.folder import choose_step
    from embedtrain.checkpoint.tensors import read_whole_encoder
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
    folder = choose_step(run_dir.checkpoints, options.step)
    to = require_replaceable(Path(options.to) if options.to else run_dir.model, run_dir.path)
    trusted = recipe.model.trust_remote_code
    source = open_source(ModelConfig(path=str(run_dir.architecture), trust_remote_code=trusted))
    loaded = load_tokenizer(source)
    tokenizer = TextTokenizer(loaded, text_length(source, loaded))
    console.note(f"{folder.path}: step {folder.step}, {folder.manifest['layout']} layout")
    with console.phase("reading the weights"):
        state = read_whole_encoder(folder.path)
        expected = plain_vectors(whole_encoder(source, state), tokenizer)
    dtype = export_dtype(options.dtype or recipe.export.dtype, source)
    with console.phase("writing the directory and reopening it with sentence-transformers"):
        exported = export_model(
            to,
            run_dir.architecture,
            state,
            dtype=dtype,
            expected=expected,
            tolerance=tolerance_of(dtype, exact_encoder=True),
            card=model_card(
                to_plain(recipe),
                figures_at(run_dir.path, folder.step),
                step=folder.step,
                dimension=expected.shape[1],
                max_length=tokenizer.max_length,
                prompts=source.prompts,
            ),
            trust_remote_code=trusted,
        )
    console.note(f"model: {exported.directory} ({str(dtype).removeprefix('torch.')}, vectors equal the encoder's)")


if __name__ == "__main__":
    enter(compose_export, act)
