"""What a run trains and saves: the progress of the run, and the module of encoder and loss."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from embedtrain.losses.types import Loss
from embedtrain.models.encoder import Encoder


@dataclass(slots=True)
class TrainState:
    """Progress of a run, saved in every checkpoint.

    It contains no random state: the order of the data and all dropout masks are functions of the seed and the step, so
    these numbers suffice to resume exactly, on any number of ranks.
    """

    step: int = 0  # completed optimizer steps
    samples: int = 0  # rows consumed
    best_by: str | None = None
    best: float | None = None  # best value of that metric so far
    best_step: int | None = None  # its step
    not_better: int = 0  # evaluations since then
    evaluation_due: bool = False  # whether a stop interrupted the evaluation of this step, which is repeated on resume
    wandb_id: str | None = None  # id of the wandb run to continue


def as_dict(state: TrainState) -> dict[str, Any]:
    """Plain values for a checkpoint's index."""
    return asdict(state)


class EncoderWithLoss(nn.Module):
    """Encoder and loss in one module, so that one checkpoint contains both; never called itself.

    FSDP gathers weights around the call of the encoder, and the loss is called with embeddings.
    """

    def __init__(self, encoder: Encoder, loss: Loss) -> None:
        super().__init__()
        self.encoder, self.loss = encoder, loss
