"""From the recipe's loss options to the loss."""

from embedtrain.config.schema import InfoNCEConfig, LossConfig
from embedtrain.errors import ConfigError
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.types import Loss


def choose_loss(config: LossConfig) -> Loss:
    """The loss that `config` describes."""
    match config:
        case InfoNCEConfig():
            return InfoNCE(config)
        case _:
            raise ConfigError(f"loss.name={config.name} is not a loss; there is infonce")
