"""Opens models of three representations: the linear layers that FlagEmbedding stores beside the backbone."""

from dataclasses import replace
from pathlib import Path

from embedtrain.config.kind_settings import HybridWeights, M3Settings
from embedtrain.config.kinds import Kind
from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.flag_embedding import COLBERT, SPARSE, has_m3_layers, read_m3_layer, read_m3_settings
from embedtrain.formats.source import read_files, source_of
from embedtrain.kinds.m3.options import M3Options
from embedtrain.models.encoder import hidden_size
from embedtrain.models.types import ModelSource


def read(kind: Kind, directory: Path, model: M3Options) -> ModelSource:
    """A directory of such a model, or of another one, whose backbone is used."""
    files = read_files(directory, model)
    if files.modules.kinds and has_m3_layers(files.directory):
        pooling = files.modules.pooling
        if pooling not in (None, Pooling.cls) or files.modules.dense:
            raise ModelError(
                f"{directory / 'modules.json'}: {model_option('kind')}=m3 has the vector of the first token (pooling "
                "cls, without "
                f"Dense modules) as the dense vector of a text, and {COLBERT}.pt and {SPARSE}.pt are of such a model; "
                "remove both to train new layers on its backbone"
            )
    return with_options(source_of(kind, files), model)


def with_options(source: ModelSource, model: M3Options) -> ModelSource:
    """The model with the settings of its files and the options; without the files its layers are new.

    A ConfigError if `model.dimension` is not that of the files; a ModelError if these cannot be used.
    """
    vectors = replace(source.vectors, pooling=Pooling.cls, include_prompt=True, normalize=True)
    return replace(source, settings=_settings(source, model), vectors=vectors)


def _settings(source: ModelSource, options: M3Options) -> M3Settings:
    directory, size = source.directory, hidden_size(source.config)
    stored = read_m3_settings(directory)
    chosen = stored.get("hybrid_weights", HybridWeights()) if options.hybrid_weights is None else options.hybrid_weights
    weights = HybridWeights(*chosen)
    if directory is None or not has_m3_layers(directory):
        dimension = options.dimension or stored.get("dim", size)
        return M3Settings(dimension=size, token_dimension=dimension, weights=weights, is_new=True)
    dimension = len(read_m3_layer(directory / f"{COLBERT}.pt", size)["weight"])
    if options.dimension not in (None, dimension):
        raise ConfigError(
            f"model.dimension={options.dimension}: {directory / COLBERT}.pt has {dimension} dimensions; leave it out"
        )
    sparse = read_m3_layer(directory / f"{SPARSE}.pt", size)["weight"]
    if len(sparse) != 1:
        raise ModelError(f"{directory / SPARSE}.pt: weight has the shape {list(sparse.shape)}; expected [1, {size}]")
    return M3Settings(dimension=size, token_dimension=dimension, weights=weights)
