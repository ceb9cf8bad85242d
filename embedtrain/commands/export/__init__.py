"""`python -m embedtrain export run=runs/NAME step=latest output_dir=DIR`: convert a checkpoint to a model directory."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from embedtrain.config.checks import check_export, check_sets
from embedtrain.config.command_options import (
    BaseOptions,
    KindOptions,
    ModelPathOptions,
    PoolingOptions,
    SetOptions,
    UploadOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.kind_settings import PageLibrary
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_sets
from embedtrain.config.paths import require_models, require_run, require_sets
from embedtrain.config.recipe import ADAPTER, ONNX, ExportConfig, ExportDtype, WeightsOf
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError

HELP = """embedtrain export: write a model directory from a checkpoint, and verify it

  embedtrain export run=runs/NAME [option=value ...]
  embedtrain export adapters='{TASK: runs/NAME, ...}' output_dir=DIR
  embedtrain export model=DIR page_library=transformers output_dir=DIR

{options: run! step output_dir dtype formats sets push_to_hub check adapters}"""

_TASK = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(kw_only=True)
class ExportOptions(UploadOptions, SetOptions, BaseOptions, PoolingOptions, KindOptions, ModelPathOptions):
    """Options of `python -m embedtrain export`."""

    run: str = option("", is_input=True)  # output_dir of a run; this or adapters
    # Instead of run: the directory has one base model and the LoRA adapters of several runs on it, by name of the task,
    # {retrieval: runs/a, clustering: runs/b}. Options that default to the recipe's take those of the first run.
    adapters: Any = option(None, is_input=True, values_are_inputs=True)
    # Instead of run, `model` is a late-interaction model over pages, which is written for this library; vectors of the
    # same weights change, and the command says by how much.
    page_library: PageLibrary | None = None
    step: str = "latest"  # latest, best, or a step's number
    weights_of: WeightsOf | None = None  # default: the moving average if the run has one (optim.ema)
    output_dir: str | None = option(None, in_result=False)  # default: model/ in the run's directory
    formats: list[str] | None = None  # default: the recipe's export.formats
    dtype: ExportDtype | None = None  # default: the recipe's export.dtype
    truncate_dim: int | None = None  # vectors have only the first so many dimensions; default: the recipe's
    rope_theta: float | None = None  # base of the rotary positions; default: the recipe's export.rope_theta
    max_file_size: str | None = option(None, in_result=False)  # default: the recipe's export.max_file_size
    onnx_min_agreement: float | None = None  # default: the recipe's export.onnx_min_agreement
    check: bool | None = option(None, in_result=False)  # reopen and compare; default: the recipe's export.check
    # Largest decrease of the main metric of a set, from the graph of onnx to a smaller one: more fails the export.
    max_metric_loss: float = option(0.02, within=(0, 1))

    @property
    def export(self) -> ExportConfig:
        """The options of the directory that is written, with defaults in place of those of the run's recipe."""
        return requested_export(self, ExportConfig())

    @property
    def runs(self) -> list[str]:
        """The output directories of the runs that are read."""
        return list(self.adapters.values()) if self.adapters else [self.run] if self.run else []


def requested_export(options: ExportOptions, recipe: ExportConfig) -> ExportConfig:
    """The export options of the recipe, overridden by those of the command line.

    The command line alone decides about an upload: the recipe's `push_to_hub` is for the last step of the run.
    """
    overrides = {
        name: getattr(options, name)
        for name in ("formats", "dtype", "truncate_dim", "rope_theta", "max_file_size", "onnx_min_agreement", "check")
    }
    return replace(
        recipe,
        **{name: value for name, value in overrides.items() if value is not None},
        push_to_hub=options.push_to_hub,
        private=options.private,
    )


def _check_adapters(options: ExportOptions, check: OptionChecks) -> None:
    is_mapping = isinstance(options.adapters, dict) and all(isinstance(run, str) for run in options.adapters.values())
    example = "must be a mapping of tasks to runs, such as {retrieval: runs/a, clustering: runs/b}"
    check.require(is_mapping and bool(options.adapters), "adapters", example)
    check.require(not options.run, "run", "and adapters are both set; keep one")
    check.require(options.output_dir is not None, "output_dir", "is missing; adapters need a directory of their own")
    is_plain = options.formats in (None, ["sentence_transformers"])
    check.require(is_plain, "formats", "a directory of adapters has no other format; leave it out")
    for task in options.adapters:
        if not isinstance(task, str) or not _TASK.fullmatch(task):
            raise ConfigError(
                f"adapters: {task!r} cannot be the name of a task, which is that of a folder: write letters, digits, "
                "_ and -, beginning with a letter"
            )


def _check_model(options: ExportOptions, check: OptionChecks) -> None:
    given = {name: getattr(options, name) for name in ("run", "adapters", "page_library", "output_dir")}
    check.require(not given["run"] and not given["adapters"], "model", "is set beside run or adapters; keep one")
    check.require(
        given["page_library"] is not None,
        "model",
        "is a directory to write for another library, and page_library is missing; for a checkpoint write run=RUN",
    )
    check.require(given["output_dir"] is not None, "output_dir", "is missing; write output_dir=DIR")
    defaults = ExportOptions()
    kept = ("model", "page_library", "output_dir", "dtype", "check", "max_file_size", "trust_remote_code")
    for field in fields(options):
        is_set = getattr(options, field.name) != getattr(defaults, field.name)
        check.require(field.name in kept or not is_set, field.name, "is for a run; leave it out")


def compose(arguments: list[str]) -> ExportOptions:
    """The options, checked."""
    options = compose_command("export", ExportOptions, arguments, HELP)
    check = OptionChecks(options)
    if options.adapters is not None:
        _check_adapters(options, check)
    if options.model:
        _check_model(options, check)
        return options
    check.require(options.page_library is None, "page_library", "is for a model directory; set model")
    options.sets = parse_sets(options.sets, "sets")
    check_sets(options.sets, "sets")
    check.require(bool(options.runs), "run", "is missing; write the output_dir of a training run")
    check_export(options.export)
    return options


def require_paths(options: ExportOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model or None)
    for run in options.runs:
        require_run(run)
    require_sets(options.sets)


def run(options: ExportOptions) -> Path:
    """Read a checkpoint in one process, write the model directory, reopen and verify it; returns the directory."""
    from embedtrain.commands.export.convert import (
        convert_directory,
        export_adapters,
        export_checkpoint,
        graph_metrics,
        open_run,
    )
    from embedtrain.formats.export_record import require_replaceable
    from embedtrain.formats.hub import require_export_support, upload_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    console = Console()
    if options.model:
        return convert_directory(options, options.export, console).directory
    runs = [open_run(path, options) for path in options.runs]
    run = runs[0]
    config = requested_export(options, run.recipe.export)
    if options.adapters:
        config.formats = ["sentence_transformers"]
    check_export(config)
    if ADAPTER in config.formats and not run.recipe.model.adapters.on:
        raise ConfigError(
            f"formats={written(config.formats)}: the run has no adapters (model.lora.rank, model.adapter); leave "
            f"{ADAPTER} out"
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
