"""Disk space that the stages of a pipeline need for models and checkpoints, from the configurations of the models."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from embedtrain.checkpoint.step_directory import GB, checkpoint_bytes, max_checkpoints_on_disk
from embedtrain.config.commands import MODEL
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ExportDtype, ModelConfig, Recipe
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.formats.hub import download_configuration
from embedtrain.formats.source import CommandModel, with_kind_of_files
from embedtrain.pipeline.types import Pipeline, Stage
from embedtrain.planning.model_costs import MetaEncoder, build_meta_encoder
from embedtrain.utils.files import directory_size
from embedtrain.utils.formatting import format_bytes

_DTYPE_BYTES = {ExportDtype.fp32: 4, ExportDtype.bf16: 2, ExportDtype.fp16: 2}


def disk_of_training(recipe: Recipe, meta: MetaEncoder) -> int:
    """Bytes of the checkpoints that a training has on the disk at a time, and of the model that it exports."""
    config = recipe.checkpoint
    size = checkpoint_bytes(meta.encoder, config.contents, recipe.optim)
    if recipe.train.steps is not None:
        count = max_checkpoints_on_disk(config, recipe.train.steps)
    else:  # how many steps an epoch has depends on the data
        count = max(2, config.keep) + (config.best_metric is not None)
    checkpoints = size * count
    if config.max_disk_gb is not None:
        checkpoints = min(checkpoints, int(config.max_disk_gb * GB))
    return checkpoints + _disk_of_model(meta, recipe.export.dtype)


def _disk_of_model(meta: MetaEncoder, dtype: ExportDtype) -> int:
    """Bytes of a model directory's weights; unless the type is set, they have that of the model's files."""
    per_weight = _DTYPE_BYTES.get(dtype) or meta.stored_dtype.itemsize
    return per_weight * sum(weight.numel() for weight in meta.encoder.parameters())


def disk_of_stage(pipeline: Pipeline, stage: Stage) -> int | None:
    """Bytes of a training, or of the model that another stage writes; None for a stage that writes none.

    Also None for a model that cannot be opened: the stage itself rejects it, or it does not exist yet.
    """
    if MODEL not in stage.command.outputs:
        return None
    try:
        if stage.is_training:
            recipe: Recipe = stage.options
            recipe = replace(recipe, model=architecture(pipeline, recipe.model))
            return disk_of_training(recipe, build_meta_encoder(recipe))
        model = architecture(pipeline, CommandModel(path=stage.output(MODEL)))
        if isinstance(model, CommandModel):
            model = with_kind_of_files(download_configuration(model))[0]
        dtype = getattr(stage.options, "dtype", None) or ExportDtype.source
        return _disk_of_model(build_meta_encoder(Recipe(model=model)), dtype)
    except (EmbedtrainError, OSError):
        return None


def require_disk_space(pipeline: Pipeline, stages: Sequence[Stage]) -> None:
    """Raise ConfigError if stages that are still to run need more than the disk has free for models and checkpoints.

    What a stage has written already counts as its own. Models that a stage makes smaller, and those that are from them,
    are not counted before that stage has ended, because their size is not known.
    """
    needed = 0
    for stage in stages:
        size = None if _model_is_unknown(pipeline, stage) else disk_of_stage(pipeline, stage)
        needed += 0 if size is None else max(0, size - directory_size(stage.directory))
    free = shutil.disk_usage(pipeline.output_dir).free
    if needed > free:
        raise ConfigError(
            f"output_dir={pipeline.output_dir}: the checkpoints and models of its stages need {needed:,} bytes "
            f"({format_bytes(needed)}), and {free:,} bytes ({format_bytes(free)}) of the disk are free: choose another "
            "output_dir, or keep fewer checkpoints (checkpoint.keep, checkpoint.max_disk_gb)"
        )


def _model_is_unknown(pipeline: Pipeline, stage: Stage) -> bool:
    chain = [stage, *map(pipeline.stage, pipeline.ancestors(stage.name))]
    return any(other.command.makes_smaller and not _has_model(other) for other in chain)


def _has_model(stage: Stage) -> bool:
    return (stage.directory / stage.command.outputs[MODEL] / "config.json").is_file()


def architecture(pipeline: Pipeline, model: ModelConfig) -> ModelConfig:
    """Model options with the path or configuration from which an earlier stage has started, until its model exists."""
    producer = next(
        (stage for stage in pipeline.stages if MODEL in stage.command.outputs and stage.output(MODEL) == model.path),
        None,
    )
    if producer is None or _has_model(producer):
        return model
    if producer.is_training:
        base = architecture(pipeline, producer.options.model)
        if isinstance(model, CommandModel):
            return base
        changes = {name: getattr(base, name) for name in ("path", "config", "tokenizer", "vocab_size", "revision")}
        own = load_kind(model.kind).own_options if type(base) is type(model) else ()
        changes |= {name: getattr(base, name) for name in ("max_length", *own) if getattr(model, name) in (None, [])}
        return replace(model, **changes)
    for name in producer.depends:
        earlier = pipeline.stage(name)
        if MODEL in earlier.command.outputs:
            whole = architecture(pipeline, replace(model, path=earlier.output(MODEL)))
            return _pruned(whole, producer.options) if producer.command.name == "prune" else whole
    # A model from outside, such as one that is pruned.
    path, pooling = (getattr(producer.options, name, None) for name in (MODEL, "pooling"))
    chosen: dict[str, Any] = (
        {"pooling": pooling} if "pooling" in vars(model) and getattr(model, "pooling", None) is None else {}
    )
    return replace(model, path=path or model.path, **chosen)


def _pruned(model: ModelConfig, options: Any) -> ModelConfig:
    """The architecture with the layers that `prune` keeps if the recipe contains it, otherwise the whole one."""
    if model.config is None:
        return model
    layers = options.keep if options.layers is None else len(options.layers)
    return replace(model, config=dict(model.config) | {"num_hidden_layers": layers})
