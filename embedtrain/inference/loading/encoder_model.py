"""The model of a command that encodes texts: its kind is that of its files."""

from collections.abc import Mapping
from dataclasses import replace

from embedtrain.config.evaluation import Backend
from embedtrain.config.recipe import ModelConfig, ParallelConfig, Precision
from embedtrain.config.validation import written
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.loading.command_model import MODEL_OPTION_NAMES, command_option_names
from embedtrain.inference.loading.graph import load_graph
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.models.adapter_files import open_adapter
from embedtrain.models.hub import resolve_directory
from embedtrain.models.late_interaction_files import late_interaction_format
from embedtrain.models.m3_files import is_m3
from embedtrain.models.module_settings import stored_kind
from embedtrain.models.source import open_model_source
from embedtrain.models.static_queries import IDF_FILE
from embedtrain.models.types import ModelSource


def open_encoder_source(model: ModelConfig) -> tuple[ModelConfig, ModelSource]:
    """`open_model_source` of a model that encodes texts, and the options with its kind.

    With `model.pooling`, `model.normalize` or `model.similarity`, one with three representations is opened as a dense
    model.

    A ConfigError for an option that this kind of model does not have.
    """
    what = late_interaction_of(model)
    if what is not None:
        for name in ("pooling", "normalize", "similarity"):
            value = getattr(model, name)
            if value is not None:
                raise ConfigError(
                    f"model.{name}={written(value)}: {model.path} is {what}, which has a normalised vector of each "
                    "token; leave it out"
                )
        model = replace(model, kind="late_interaction")
    elif _is_sparse(model):
        if model.similarity is not None:
            raise ConfigError(
                f"model.similarity={written(model.similarity)}: {model.path} is a learned sparse model, whose weights "
                "of words are compared by inner product; leave it out"
            )
        model = replace(model, kind="sparse")
    elif model.path and model.pooling is None and model.normalize is None and model.similarity is None:
        directory = resolve_directory(model.path, model.revision, "model.path", "model.revision")
        if is_m3(directory):
            model = replace(model, kind="m3")
    if model.m3.hybrid_weights is not None and model.kind != "m3":
        raise ConfigError(
            f"model.m3.hybrid_weights={written(model.m3.hybrid_weights)}: {model.path} is opened as a model of one "
            f"representation ({model.kind}); leave it out"
        )
    source = open_model_source(model)
    adapter = open_adapter(model.lora)
    return model, source if adapter is None else replace(source, adapter=adapter.directory)


def late_interaction_of(model: ModelConfig) -> str | None:
    """Which late-interaction model the files are, in words for a message; None for other models."""
    if not model.path:
        return None
    return late_interaction_format(resolve_directory(model.path, model.revision, "model.path", "model.revision"))


def _is_sparse(model: ModelConfig) -> bool:
    """Whether the files are those of a learned sparse model, and no pooling makes another one of its backbone."""
    if not model.path or model.pooling is not None:
        return False
    directory = resolve_directory(model.path, model.revision, "model.path", "model.revision")
    return stored_kind(directory) == "sparse" or (directory / IDF_FILE).is_file()


def load_encoder_model(
    model: ModelConfig,
    precision: Precision,
    world: World,
    names: Mapping[str, str] = MODEL_OPTION_NAMES,
    *,
    backend: Backend = Backend.torch,
) -> LoadedModel:
    """Open and load the model of a command that encodes texts. A collective.

    `names` are those of `command_option_names`, for errors.
    """
    with command_option_names(names):
        with world.fail_together("opening the model"):
            model, source = open_encoder_source(model)
        if backend is not Backend.torch:
            return load_graph(source, backend, world)
        return load_model(model, ParallelConfig(precision=precision), world, seed=0, source=source, work=None)
