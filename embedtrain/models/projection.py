"""The projection of a late-interaction model, and which settings of its files the options of a recipe replace."""

from transformers import PretrainedConfig

from embedtrain.config.late_interaction import LateInteractionConfig
from embedtrain.config.token_vectors import DEFAULT_DIM, TokenVectors
from embedtrain.errors import ConfigError
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

    A ConfigError if `model.late_interaction.dim` is not that of the files.

    Args:
        dense: the projection in the model's files, of tokens to vectors.
        stored: settings of the files; None if they are of another kind of model, whose backbone alone is used.
        config: of the backbone.
    """
    if stored is None or not dense:
        dim = DEFAULT_DIM if options.dim is None else options.dim
        new = DenseSource(directory=None, num_in=hidden_size(config), num_out=dim, bias=False, activation=_IDENTITY)
        return (new,), (stored or TokenVectors()).with_options(options, is_new=True)
    if options.dim not in (None, dense[-1].num_out):
        raise ConfigError(
            f"model.late_interaction.dim={options.dim}: the projection in {dense[-1].directory} has "
            f"{dense[-1].num_out} dimensions; leave it out"
        )
    return dense, stored.with_options(options)
