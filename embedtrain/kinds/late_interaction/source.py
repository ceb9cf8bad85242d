"""Opens late-interaction models: the projection, and which settings of the files the options of a recipe replace."""

from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from embedtrain.config.kind_settings import (
    DEFAULT_DIMENSION,
    DEFAULT_EXPANSION_LENGTH,
    Expansion,
    QueryExpansion,
    TokenVectors,
)
from embedtrain.config.kinds import Kind
from embedtrain.config.validation import model_option
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.pylate import late_interaction_format, read_late_interaction
from embedtrain.formats.source import adapted_config, read_files, require_own_transformer, source_of
from embedtrain.kinds.late_interaction.options import LateInteractionOptions, check_no_pages
from embedtrain.kinds.late_interaction.pages import new_pages, read_pages
from embedtrain.models.encoder import hidden_size
from embedtrain.models.types import DenseSource, ModelSource, Tokenization, VectorSettings
from embedtrain.models.vision_language import FAMILIES

_IDENTITY = "torch.nn.modules.linear.Identity"


def read(kind: Kind, directory: Path, model: LateInteractionOptions) -> ModelSource:
    """A directory of any of the formats of late-interaction models, or of another model, whose backbone is used."""
    if (pages := read_pages(kind, directory, model)) is not None:
        return pages
    if late_interaction_format(directory) is None:
        stored = read_files(directory, model)
        source = source_of(kind, stored)
        return new_pages(source, stored, model) if source.config.model_type in FAMILIES else with_options(source, model)
    files = read_late_interaction(directory)
    if files.transformer != directory:
        require_own_transformer(files.transformer, directory, model)
    source = ModelSource(
        kind=kind,
        settings=files.token_vectors,
        directory=files.transformer,
        config=adapted_config(files.transformer, model),
        vectors=VectorSettings(dense=files.dense),
        tokenization=Tokenization(
            lowercase=files.lowercase, is_sentence_transformers=True, prompt_tokens=files.prompt_tokens
        ),
        prompts=files.prompts,
        trust_remote_code=model.trust_remote_code,
    )
    return with_options(source, model)


def with_options(source: ModelSource, model: LateInteractionOptions) -> ModelSource:
    """The model with the options in place of the settings of its files."""
    check_no_pages(model)
    dense, settings = _projection(source.vectors.dense, source.settings, source.config, model)
    max_length = source.tokenization.max_length or settings.max_length
    tokenization = replace(source.tokenization, max_length=max_length)
    vectors = replace(source.vectors, dense=dense, normalize=True)
    return replace(source, settings=settings, vectors=vectors, tokenization=tokenization)


def _projection(
    dense: tuple[DenseSource, ...],
    stored: TokenVectors | None,
    config: PretrainedConfig,
    options: LateInteractionOptions,
) -> tuple[tuple[DenseSource, ...], TokenVectors]:
    """The projection and the settings of a late-interaction model; a new projection starts from the seed.

    A ConfigError if `model.dimension` is not that of the files, or options contradict each other; a ModelError if the
    projection does not fit the backbone.

    Args:
        dense: the projection in the model's files, of tokens to vectors.
        stored: settings of the files; None if they are of another kind of model, whose backbone alone is used.
        config: of the backbone.
    """
    if stored is None or not dense:
        size = DEFAULT_DIMENSION if options.dimension is None else options.dimension
        new = DenseSource(directory=None, num_in=hidden_size(config), num_out=size, bias=False, activation=_IDENTITY)
        return (new,), replace(_settings(stored or TokenVectors(), options), is_new=True)
    sizes = [hidden_size(config), *(head.num_out for head in dense)]
    for size, head in zip(sizes, dense, strict=False):
        if head.num_in != size:
            raise ModelError(f"{head.directory}: linear.weight projects {head.num_in} dimensions, and receives {size}")
    if options.dimension not in (None, dense[-1].num_out):
        raise ConfigError(
            f"model.dimension={options.dimension}: the projection in {dense[-1].directory} has {dense[-1].num_out} "
            "dimensions; leave it out"
        )
    return dense, _settings(stored, options)


def _settings(stored: TokenVectors, options: LateInteractionOptions) -> TokenVectors:
    """The settings with the options that a recipe sets in place of those of the files; these have an effect."""
    settings = replace(
        stored,
        query_length=stored.query_length if options.query_length is None else options.query_length,
        document_length=stored.document_length if options.document_length is None else options.document_length,
        expansion=_expansion(stored.expansion, options),
        skiplist_words=stored.skiplist_words if options.skiplist_words is None else tuple(options.skiplist_words),
        similarity=stored.similarity if options.similarity is None else options.similarity,
    )
    expansion = settings.expansion
    if expansion is None:
        for name in ("expansion_length", "expansion_token", "attend_to_expansion_tokens"):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"{model_option(name)}={getattr(options, name)} has no effect, because queries are not expanded: "
                    "leave it "
                    "out, or set query_expansion to min or fixed"
                )
        return settings
    is_fixed = expansion.strategy is QueryExpansion.fixed
    if options.query_length is not None and (
        options.query_length < expansion.length or (is_fixed and options.query_length != expansion.length)
    ):
        raise ConfigError(
            f"model.query_length={options.query_length}: queries are expanded to {expansion.length} tokens "
            f"({expansion.strategy.value}); set expansion_length instead, or leave query_length out"
        )
    # A length of the files is below that of expanded queries only if the recipe has changed the expansion.
    return replace(
        settings,
        query_length=None if is_fixed else settings.query_length and max(settings.query_length, expansion.length),
    )


def _expansion(stored: Expansion | None, options: LateInteractionOptions) -> Expansion | None:
    strategy = options.query_expansion or (QueryExpansion.none if stored is None else stored.strategy)
    if strategy is QueryExpansion.none:
        return None
    length, token, attend = options.expansion_length, options.expansion_token, options.attend_to_expansion_tokens
    stored = stored or Expansion(strategy=strategy, length=DEFAULT_EXPANSION_LENGTH)
    return Expansion(
        strategy=strategy,
        length=stored.length if length is None else length,
        token=stored.token if token is None else token,
        attend=stored.attend if attend is None else attend,
    )
