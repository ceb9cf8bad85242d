"""The projection of a late-interaction model, and which settings of its files the options of a recipe replace."""

from dataclasses import replace

from transformers import PretrainedConfig

from embedtrain.config.late_interaction import LateInteractionConfig, QueryExpansion
from embedtrain.config.token_vectors import DEFAULT_DIM, TokenVectors
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.encoder import hidden_size
from embedtrain.models.module_settings import DenseSource

_IDENTITY = "torch.nn.modules.linear.Identity"


def token_projection(
    dense: tuple[DenseSource, ...],
    stored: TokenVectors | None,
    config: PretrainedConfig,
    options: LateInteractionConfig,
) -> tuple[tuple[DenseSource, ...], TokenVectors]:
    """The projection and the settings of a late-interaction model; a new projection starts from the seed.

    A ConfigError if `model.late_interaction.dim` is not that of the files, or options contradict each other; a
    ModelError if the projection does not fit the backbone.

    Args:
        dense: the projection in the model's files, of tokens to vectors.
        stored: settings of the files; None if they are of another kind of model, whose backbone alone is used.
        config: of the backbone.
    """
    if stored is None or not dense:
        dim = DEFAULT_DIM if options.dim is None else options.dim
        new = DenseSource(directory=None, num_in=hidden_size(config), num_out=dim, bias=False, activation=_IDENTITY)
        return (new,), _with_options(stored or TokenVectors(), options, is_new=True)
    sizes = [hidden_size(config), *(head.num_out for head in dense)]
    for size, head in zip(sizes, dense, strict=False):
        if head.num_in != size:
            raise ModelError(f"{head.directory}: linear.weight projects {head.num_in} dimensions, and receives {size}")
    if options.dim not in (None, dense[-1].num_out):
        raise ConfigError(
            f"model.late_interaction.dim={options.dim}: the projection in {dense[-1].directory} has "
            f"{dense[-1].num_out} dimensions; leave it out"
        )
    return dense, _with_options(stored, options)


def _with_options(stored: TokenVectors, options: LateInteractionConfig, *, is_new: bool = False) -> TokenVectors:
    """`TokenVectors.with_options`, whose options have an effect."""
    settings = stored.with_options(options, is_new=is_new)
    expansion = settings.expansion
    if expansion is None:
        for name in ("expansion_length", "expansion_token", "attend_to_expansion_tokens"):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"model.late_interaction.{name}={getattr(options, name)} has no effect, because queries are not "
                    "expanded: leave it out, or set query_expansion to min or fixed"
                )
        return settings
    is_fixed = expansion.strategy is QueryExpansion.fixed
    if options.query_length is not None and (
        options.query_length < expansion.length or (is_fixed and options.query_length != expansion.length)
    ):
        raise ConfigError(
            f"model.late_interaction.query_length={options.query_length}: queries are expanded to {expansion.length} "
            f"tokens ({expansion.strategy.value}); set expansion_length instead, or leave query_length out"
        )
    # A length of the files is below that of expanded queries only if the recipe has changed the expansion.
    return replace(
        settings,
        query_length=None if is_fixed else settings.query_length and max(settings.query_length, expansion.length),
    )
