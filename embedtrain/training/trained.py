"""What a run trains: the encoder, and the parameters that its loss owns."""

from torch import nn

from embedtrain.losses.types import Loss
from embedtrain.models.encoder import Encoder


class Trained(nn.Module):
    """Encoder and loss side by side, so that one optimiser and one checkpoint hold both.

    Nobody calls it: the encoder is called by itself, for FSDP gathers weights around its own `__call__`, and
    the loss is given vectors.

    Args:
        encoder: sharded.
        loss: whole on every rank.
    """

    def __init__(self, encoder: Encoder, loss: Loss) -> None:
        super().__init__()
        self.encoder, self.loss = encoder, loss
