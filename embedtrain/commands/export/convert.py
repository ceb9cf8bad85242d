"""Convert a checkpoint to a model directory in one process, without ranks and without a GPU."""

from dataclasses import replace
from pathlib import Path

from embedtrain.checkpoint.snapshot import AVERAGE
from embedtrain.checkpoint.tensor_files import TensorReader
from embedtrain.commands.export.runs import ExportedRun
from embedtrain.config.compose import to_plain
from embedtrain.config.kinds import load_kind
from embedtrain.config.loss_checks import matryoshka_dims_of
from embedtrain.config.recipe import LOGIT_SCORE, ONNX, ExportConfig
from embedtrain.data.tokens import TextTokenizer
from embedtrain.formats.export import (
    ExportResult,
    checkpoint_weights,
    export_dtype,
    load_checkpoint_encoder,
    plan_export,
)
from embedtrain.formats.model_card import model_card, recipe_of_weights
from embedtrain.formats.onnx import GraphMeasure, require_graph
from embedtrain.formats.peft import AdapterBase, AdapterCheckpoint, require_same_base
from embedtrain.formats.quantisation_file import write_trained_ranges
from embedtrain.formats.replacement import export_lock
from embedtrain.formats.transformers import complete_older_files
from embedtrain.formats.verify import ExportReference, export_tolerance, probe_outputs
from embedtrain.inference.loading.bound_tokenizer import bound_tokenizer
from embedtrain.losses.quantisation import ranges_dimension
from embedtrain.models.adapters import without_adapters
from embedtrain.models.source import open_model_source
from embedtrain.models.tokenizer import load_tokenizer
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console


def export_checkpoint(
    run: ExportedRun,
    output_dir: Path,
    config: ExportConfig,
    *,
    trust_remote_code: bool,
    console: Console,
    measure: GraphMeasure | None = None,
) -> ExportResult:
    """Write a checkpoint as a model directory, which replaces `output_dir` once it has passed all checks.

    At most one copy of the model is in memory, and none if `config.check` is false. `measure` is called with each
    graph, see `write_variants`.

    Raises CheckpointError if the checkpoint does not fit the model, or the directory does not reproduce its embeddings;
    ConfigError if another export to the directory is running.
    """
    run_dir, recipe, checkpoint = run.run_dir, run.recipe, run.checkpoint
    source = _open_architecture(run, config, trust_remote_code=trust_remote_code)
    tokenizer = bound_tokenizer(source, load_tokenizer(source))
    dtype = export_dtype(config.dtype, source)
    base: ModelSource | None = None
    if ONNX in config.formats:
        require_graph(source)
    if LOGIT_SCORE in config.formats:
        base = open_model_source(recipe.model)
        base.kind.files.require_logit_score(base, run_dir.architecture)
    reference: ExportReference | None = None
    if run.kind == AVERAGE:
        console.note("exporting the moving average of the weights (optim.ema)")
    with export_lock(output_dir) as unfinished, checkpoint.tensors(run.kind) as reader:
        adapters, adapter = _open_adapters(run, source, reader)
        if config.check:
            with console.phase("encoding probe texts with the checkpoint's weights"):
                tolerance = export_tolerance(dtype, exact_encoder=True)
                reference = _reference(adapters, source, reader, tokenizer, tolerance)
        weights = checkpoint_weights(reader) if adapters is None else adapters.merged()
        export = plan_export(
            output_dir, unfinished, run_dir.architecture, weights, dtype, config, adapter=adapter, base=base
        )
        export = replace(export, matryoshka_dims=frozenset(matryoshka_dims_of(recipe.loss)))
        with console.phase("writing the directory"):
            export.begin()
            complete_older_files(unfinished, source, tokenizer)
            export.write(weights.rows, main=True)
        names = [name for name in reader.specs if ranges_dimension(name) is not None]
        ranges = {name: rows for name in names for _, rows in reader.all_rows(name)}
        write_trained_ranges(unfinished, ranges, checkpoint.step)
        card = model_card(
            recipe_of_weights(checkpoint.manifest.recipe, to_plain(recipe)),
            run_dir.path,
            step=checkpoint.step,
            dimension=config.truncate_dim or source.dimension,
            max_length=tokenizer.max_length,
            prompts=source.prompts,
            formats=config.formats,
            name=config.push_to_hub,
        )
        return export.finish(card, reference, trust_remote_code=trust_remote_code, phase=console.phase, measure=measure)


def _open_architecture(run: ExportedRun, config: ExportConfig, *, trust_remote_code: bool) -> ModelSource:
    """The model of a run; a ConfigError if it cannot be exported with these options."""
    kind = run.recipe.model.kind
    source = open_model_source(
        load_kind(kind).options(
            path=str(run.run_dir.architecture),
            rope_theta=config.rope_theta,
            trust_remote_code=trust_remote_code,
        )
    )
    source.kind.files.check_export(config, kind)
    source.require_dimensions([config.truncate_dim], "truncate_dim")
    return source


def _open_adapters(
    run: ExportedRun, source: ModelSource, reader: TensorReader
) -> tuple[AdapterCheckpoint, AdapterBase] | tuple[None, None]:
    """The trained adapters, and what an export of them alone depends on; None without adapters."""
    recipe, directory = run.recipe, run.run_dir.adapter
    if not recipe.model.lora.on:
        return None, None
    adapters = AdapterCheckpoint.open(directory, recipe.model, recipe.seed, source, reader)
    require_same_base(run.checkpoint, adapters.base)
    return adapters, AdapterBase(directory, adapters.base, recipe.seed, load_in_4bit=recipe.model.lora.load_in_4bit)


def _reference(
    adapters: AdapterCheckpoint | None,
    source: ModelSource,
    reader: TensorReader,
    tokenizer: TextTokenizer,
    tolerance: float,
) -> ExportReference:
    """What the export has to reproduce. Adapters stay unmerged here, so that the check includes the merge."""
    if adapters is None:
        return ExportReference.of(load_checkpoint_encoder(source, reader), source, tokenizer, tolerance)
    encoder = adapters.encoder()
    reference = ExportReference.of(encoder, source, tokenizer, tolerance)
    with without_adapters(encoder):
        return replace(reference, base_vectors=probe_outputs(encoder, source, tokenizer))
