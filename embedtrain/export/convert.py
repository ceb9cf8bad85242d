"""From a checkpoint's files to a model directory in one process, with no ranks and no GPU."""

from pathlib import Path

from embedtrain.checkpoint.export.adapters import AdapterCheckpoint, require_same_base
from embedtrain.checkpoint.export.model_card import model_card
from embedtrain.checkpoint.export.model_export import (
    ExportResult,
    checkpoint_weights,
    export_dtype,
    export_lock,
    load_checkpoint_encoder,
    plan_export,
)
from embedtrain.checkpoint.export.verify import AdapterBase, ExportReference, export_tolerance, probe_vectors
from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.snapshot import WEIGHTS
from embedtrain.checkpoint.step_directory import Checkpoint
from embedtrain.checkpoint.tensor_files import TensorReader
from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import ExportConfig, ModelConfig, Recipe
from embedtrain.data.tokens import TextTokenizer
from embedtrain.models.adapters import without_adapters
from embedtrain.models.build import build_encoder
from embedtrain.models.source import ModelSource, open_model_source
from embedtrain.models.tokenizer import load_tokenizer, resolve_max_length
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import metrics_at


def export_step(
    run_dir: RunDirectory,
    recipe: Recipe,
    folder: Checkpoint,
    to: Path,
    asked: ExportConfig,
    *,
    trust_remote_code: bool,
    console: Console,
) -> ExportResult:
    """Write a step of a run as a model directory; at most one copy of the model is in memory, and none unchecked.

    Args:
        run_dir: of the run.
        recipe: the run's.
        folder: the step's checkpoint.
        to: replaced if it exists, once the new one has passed.
        asked: what to write.
        trust_remote_code: whether Python that lies in the run's directory may run.
        console: shows what is going on.

    Raises:
        CheckpointError: the checkpoint or the directory written is not what it should be.
        ConfigError: another export to the same directory is under way.
        OSError: the directory cannot be written.
    """
    source = open_model_source(ModelConfig(path=str(run_dir.architecture), trust_remote_code=trust_remote_code))
    loaded = load_tokenizer(source)
    tokenizer = TextTokenizer(loaded, resolve_max_length(source, loaded))
    dtype = export_dtype(asked.dtype, source)
    expected: ExportReference | None = None
    with export_lock(to), folder.tensors(WEIGHTS) as stored:
        adapters: AdapterCheckpoint | None = None
        if recipe.model.lora.on:
            adapters = AdapterCheckpoint.open(run_dir.adapter, recipe.model, recipe.seed, source, stored)
            require_same_base(folder, adapters.base)
        if asked.check:
            with console.phase("encoding probe texts with the checkpoint's weights"):
                expected = _expected(adapters, source, stored, tokenizer, export_tolerance(dtype, exact_encoder=True))
        pieces = checkpoint_weights(stored) if adapters is None else adapters.merged()
        settings, base = (
            (None, None)
            if adapters is None
            else (run_dir.adapter, AdapterBase(adapters.base, recipe.seed, load_in_4bit=adapters.load_in_4bit))
        )
        export = plan_export(to, run_dir.architecture, pieces, dtype, asked, settings=settings, base=base)
        with console.phase("writing the directory"):
            export.begin()
            export.write(pieces.rows, main=True)
        card = model_card(
            to_plain(recipe),
            metrics_at(run_dir.path, folder.step),
            step=folder.step,
            dimension=build_encoder(source).dimension,
            max_length=tokenizer.max_length,
            prompts=source.prompts,
            formats=asked.formats,
            name=asked.push_to_hub,
        )
        return export.finish(card, expected, trust_remote_code=trust_remote_code, phase=console.phase)


def _expected(
    adapters: AdapterCheckpoint | None,
    source: ModelSource,
    stored: TensorReader,
    tokenizer: TextTokenizer,
    tolerance: float,
) -> ExportReference:
    """What the export has to be like; the adapters are not merged here, so that merging is compared as well."""
    if adapters is None:
        return ExportReference(
            probe_vectors(load_checkpoint_encoder(source, stored), tokenizer),
            tolerance,
            source.prompts,
            tokenizer.max_length,
        )
    encoder = adapters.encoder()
    vectors = probe_vectors(encoder, tokenizer)
    with without_adapters(encoder):
        without = probe_vectors(encoder, tokenizer)
    return ExportReference(vectors, tolerance, source.prompts, tokenizer.max_length, without)
