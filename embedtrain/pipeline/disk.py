"""Disk space that the trainings of a pipeline need, from the configurations of their models."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from embedtrain.checkpoint.step_directory import GB, checkpoint_bytes, max_checkpoints_on_disk
from embedtrain.config.recipe import ExportDtype, ModelConfig, Recipe
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.files import directory_size
from embedtrain.formatting import format_bytes
from embedtrain.pipeline.registry import MODEL, PRUNE, STATIC, TRAIN, TRIM
from embedtrain.pipeline.types import Pipeline, Stage
from embedtrain.planning.meta_encoder import MetaEncoder, build_meta_encoder

_DTYPE_BYTES = {ExportDtype.fp32: 4, ExportDtype.bf16: 2, ExportDtype.fp16: 2}
_SMALLER = (PRUNE, TRIM, STATIC)  # kinds of stages whose model is smaller than the one that it is from


def disk_of_training(recipe: Recipe, meta: MetaEncoder) -> int:
    """Bytes of the checkpoints that a training has on the disk at a time, and of the model that it exports."""
    config = recipe.checkpoint
    size = checkpoint_bytes(meta.encoder, config.contents, max(recipe.optim.state_bytes))
    if recipe.train.steps is not None:
        count = max_checkpoints_on_disk(config, recipe.train.steps)
    else:  # how many steps an epoch has depends on the data
        count = max(2, config.keep) + (config.best_metric is not None)
    checkpoints = size * (count if config.every else 1 + (config.best_metric is not None))
    if config.max_disk_gb is not None:
        checkpoints = min(checkpoints, int(config.max_disk_gb * GB))
    per_weight = _DTYPE_BYTES.get(recipe.export.dtype) or meta.stored_dtype.itemsize
    return checkpoints + per_weight * sum(weight.numel() for weight in meta.encoder.parameters())


def require_disk_space(pipeline: Pipeline, stages: Sequence[Stage]) -> None:
    """Raise ConfigError if the trainings among the stages that are still to run need more than the disk has free.

    What a stage has written already counts as its own. Trainings of models that an earlier stage makes smaller are not
    counted before that stage has ended, because the size of these models is not known.
    """
    needed = 0
    for stage in stages:
        if stage.kind.name != TRAIN or _model_is_unknown(pipeline, stage):
            continue
        recipe: Recipe = stage.options
        try:
            meta = build_meta_encoder(replace(recipe, model=architecture(pipeline, recipe.model)))
            needed += max(0, disk_of_training(recipe, meta) - directory_size(stage.directory))
        except (EmbedtrainError, OSError):
            continue  # of a model that the stage itself rejects, or whose adapter does not exist yet
    free = shutil.disk_usage(pipeline.output_dir).free
    if needed > free:
        raise ConfigError(
            f"output_dir={pipeline.output_dir}: the checkpoints and models of its trainings need {needed:,} bytes "
            f"({format_bytes(needed)}), and {free:,} bytes ({format_bytes(free)}) of the disk are free: choose another "
            "output_dir, or keep fewer checkpoints (checkpoint.keep, checkpoint.max_disk_gb)"
        )


def _model_is_unknown(pipeline: Pipeline, stage: Stage) -> bool:
    earlier = map(pipeline.stage, pipeline.ancestors(stage.name))
    return any(other.kind.name in _SMALLER and not _has_model(other) for other in earlier)


def _has_model(stage: Stage) -> bool:
    return (stage.directory / stage.kind.outputs[MODEL] / "config.json").is_file()


def architecture(pipeline: Pipeline, model: ModelConfig) -> ModelConfig:
    """Model options with the path or configuration from which an earlier stage has started, until its model exists."""
    producer = next(
        (stage for stage in pipeline.stages if MODEL in stage.kind.outputs and stage.output(MODEL) == model.path), None
    )
    if producer is None or _has_model(producer):
        return model
    if producer.kind.name == TRAIN:
        base = architecture(pipeline, producer.options.model)
        names = ("path", "config", "tokenizer", "vocab_size", "revision", "heads")
        changes = {name: getattr(base, name) for name in names}
        for name in ("pooling", "max_length"):
            changes[name] = getattr(base, name) if getattr(model, name) is None else getattr(model, name)
        return replace(model, **changes)
    for name in producer.depends:
        earlier = pipeline.stage(name)
        if MODEL in earlier.kind.outputs:
            whole = architecture(pipeline, replace(model, path=earlier.output(MODEL)))
            return _pruned(whole, producer.options) if producer.kind.name == PRUNE else whole
    # A model from outside, such as one that is pruned.
    path, pooling = (getattr(producer.options, name, None) for name in (MODEL, "pooling"))
    return replace(model, path=path or model.path, pooling=pooling if model.pooling is None else model.pooling)


def _pruned(model: ModelConfig, options: Any) -> ModelConfig:
    """The architecture with the layers that `prune` keeps if the recipe contains it, otherwise the whole one."""
    if model.config is None:
        return model
    layers = options.keep if options.layers is None else len(options.layers)
    return replace(model, config=dict(model.config) | {"num_hidden_layers": layers})
