"""`python -m embedtrain export run=runs/NAME step=latest output_dir=DIR`: convert a checkpoint to a model directory."""

from pathlib import Path

from embedtrain.commands.export.options import ExportOptions, compose, requested_export
from embedtrain.config.checks import check_export
from embedtrain.config.paths import require_run, require_sets
from embedtrain.config.recipe import ADAPTER, ONNX
from embedtrain.config.validation import written
from embedtrain.errors import ConfigError

__all__ = ["ExportOptions", "compose", "require_paths", "run"]


def require_paths(options: ExportOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    for run in options.runs:
        require_run(run)
    require_sets(options.sets)


def run(options: ExportOptions) -> Path:
    """Read a checkpoint in one process, write the model directory, reopen and verify it; returns the directory."""
    from embedtrain.commands.export.adapters import export_adapters
    from embedtrain.commands.export.convert import export_checkpoint
    from embedtrain.commands.export.graph_metrics import graph_metrics
    from embedtrain.commands.export.runs import open_run
    from embedtrain.formats.hub import require_export_support, upload_model
    from embedtrain.formats.replacement import require_replaceable
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    console = Console()
    runs = [open_run(path, options) for path in options.runs]
    run = runs[0]
    config = requested_export(options, run.recipe.export)
    if options.adapters:
        config.formats = ["sentence_transformers"]
    check_export(config)
    if ADAPTER in config.formats and not run.recipe.model.lora.on:
        raise ConfigError(
            f"formats={written(config.formats)}: the run has no adapters (model.lora.rank); leave {ADAPTER} out"
        )
    if options.sets and ONNX not in config.formats:
        raise ConfigError(f"formats={written(config.formats)}: sets are for its graphs; add onnx, or leave sets out")
    require_export_support(config)
    output_dir = Path(options.output_dir) if options.output_dir else run.run_dir.model
    for exported in runs:
        output_dir = require_replaceable(output_dir, exported.run_dir.path)
        checkpoint = exported.checkpoint
        console.note(f"{checkpoint.path}: step {checkpoint.step}, {checkpoint.manifest.layout.value} layout")
    if options.adapters:
        result = export_adapters(
            dict(zip(options.adapters, runs, strict=True)),
            output_dir,
            config,
            trust_remote_code=options.trust_remote_code,
            console=console,
        )
    else:
        with graph_metrics(options, run.recipe.model.kind, console) as measure:
            result = export_checkpoint(
                run,
                output_dir,
                config,
                trust_remote_code=options.trust_remote_code,
                console=console,
                measure=measure,
            )
    if result.difference is None:
        console.warn("check=false: names and shapes are correct, but the embeddings were not compared")
    console.note(f"model: {result.directory} ({result.describe()})")
    for note in result.notes:
        console.note(note)
    if config.push_to_hub is not None:
        with console.phase(f"uploading to {config.push_to_hub}"):
            address = upload_model(
                result.directory, config.push_to_hub, private=config.private, step=run.checkpoint.step
            )
        console.note(f"uploaded: {address}")
    return result.directory
