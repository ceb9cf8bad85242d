"""Opens dense models: pooling, Dense heads, normalisation and similarity; tables of static embeddings among them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from embedtrain.config.kinds import Kind
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option, written
from embedtrain.errors import ConfigError
from embedtrain.formats.sentence_transformers import SETTINGS, Module, read_similarity, read_truncate_dim
from embedtrain.formats.source import read_files, source_of
from embedtrain.formats.static_embedding import is_static
from embedtrain.kinds.dense.options import CHUNKING_FILE, DenseOptions, include_prompt_error
from embedtrain.kinds.dense.vision import read_vision, reads_pictures
from embedtrain.models.attention_direction import require_pooling
from embedtrain.models.file_references import read_json
from embedtrain.models.heads import dense_heads
from embedtrain.models.pooling import pooling_of
from embedtrain.models.types import ModelSource


def read(kind: Kind, directory: Path, model: DenseOptions, route: Sequence[Module] | None = None) -> ModelSource:
    """A directory of sentence-transformers or a route of its Router, or one of transformers with `model.pooling`."""
    files = read_files(directory, model, route)
    source, what = source_of(kind, files), f"{directory}, which has no modules.json,"
    if files.modules.kinds:
        what = f"{directory}, whose modules.json has no Pooling,"
        vectors = replace(
            source.vectors,
            pooling=files.modules.pooling or Pooling.cls,
            pooling_directory=files.modules.pooling_directory,
            dense=tuple(files.modules.dense),
            truncate_dim=read_truncate_dim(directory / SETTINGS),
            similarity=read_similarity(files.settings, directory, tuple(VectorSimilarity)),
        )
        source = replace(source, vectors=vectors)
    if files.modules.pooling is None:
        require_pooling_option(model, what)
    if (vision := read_vision(files, model)) is not None:
        source = replace(source, settings=vision)
    if (directory / CHUNKING_FILE).is_file():
        late = read_json(directory / CHUNKING_FILE).get("late") is True
        source = replace(source, vectors=replace(source.vectors, late_chunking=late))
    return with_options(source, model)


def require_pooling_option(model: DenseOptions, what: str) -> None:
    """A ConfigError without `model.pooling`, which `what`, in words for the message, does not define."""
    if model.pooling is None:
        name = model_option("pooling")
        in_recipe = "model.pooling" if name == "pooling" else name
        raise ConfigError(f"{what} defines no pooling: set pooling ({in_recipe} in a recipe) to cls, mean or last")


def with_options(source: ModelSource, model: DenseOptions) -> ModelSource:
    """The model with the options in place of the settings of its files."""
    if is_static(source.config):
        _require_static_options(model)
    stored = source.vectors
    pooling = stored.pooling if model.pooling is None else pooling_of(model.pooling)
    if model.pooling is not None:
        require_pooling(source.config, model.pooling)
    if model.include_prompt is False and pooling is not Pooling.mean:
        raise ConfigError(include_prompt_error(pooling))
    if pooling is Pooling.weighted_mean and not stored.include_prompt and not model.include_prompt:
        raise ConfigError(
            f"{model_option('pooling')}=weighted_mean: counts the tokens of the prompt, and the model has "
            "include_prompt=false: "
            "write model.include_prompt=true"
        )
    vectors = replace(
        stored,
        pooling=pooling,
        pooling_directory=stored.pooling_directory if pooling == stored.pooling else None,
        include_prompt=stored.include_prompt if model.include_prompt is None else model.include_prompt,
        dense=dense_heads(stored.dense, source.config, model.heads),
        normalize=stored.normalize if model.normalize is None else model.normalize,
        similarity=model.similarity or stored.similarity,
        late_chunking=stored.late_chunking if model.chunking.late is None else model.chunking.late,
        chunk_negatives=model.chunking.negatives,
    )
    if vectors.late_chunking:
        _require_chunks(replace(source, vectors=vectors))
    return replace(source, vectors=vectors, tokenization=replace(source.tokenization, append_eos=model.append_eos))


def _require_chunks(source: ModelSource) -> None:
    """A ConfigError for a model whose vectors are not those of any tokens of a longer text."""
    option, vectors = model_option("chunking.late"), source.vectors
    if is_static(source.config):
        raise ConfigError(f"{option}=true: a static embedding model reads each word alone; leave it out")
    if reads_pictures(source):
        raise ConfigError(f"{option}=true: is for models of texts, and {source.config.model_type} reads pictures")
    if vectors.pooling is Pooling.cls:
        raise ConfigError(
            f"{option}=true: with pooling=cls a vector is that of a text's first token, which a chunk does not have; "
            "write pooling=mean or last"
        )
    if vectors.similarity not in (VectorSimilarity.cosine, VectorSimilarity.dot):
        raise ConfigError(
            f"{option}=true: chunks are searched by cosine or dot, not by {vectors.similarity.value}; write similarity="
            "cosine"
        )


def _require_static_options(model: DenseOptions) -> None:
    """A ConfigError for an option of `model` that a table does not have."""
    if model.pooling not in (None, Pooling.mean):
        raise ConfigError(
            f"{model_option('pooling')}={written(model.pooling)}: a static embedding model is the mean of its "
            "tokens' rows; leave "
            "it out"
        )
    if model.adapters.on:
        raise ConfigError("model.lora: adapters are not for a table of static embeddings; leave it out")
    for name in ("bidirectional", "append_eos", "include_prompt", "rope_scaling"):
        if (value := getattr(model, name)) is not None and not (name == "include_prompt" and value):
            raise ConfigError(
                f"{model_option(name)}={written(value)}: has no effect on a table of static embeddings; leave it out"
            )
