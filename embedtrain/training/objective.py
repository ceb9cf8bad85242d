"""The loss of a run: built for all sources, on this rank's device, with TF32 products in bf16 runs."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from embedtrain.config.losses import LossConfig
from embedtrain.config.recipe import Precision, Recipe
from embedtrain.data.train_data import TrainData
from embedtrain.distributed.world import World
from embedtrain.loading.load import LoadedModel
from embedtrain.losses.build import build_losses, loss_notes
from embedtrain.losses.types import FROM_ROWS, Loss
from embedtrain.tracking.console import Console
from embedtrain.training.guides import GuideModel


def use_tf32_products(loss: nn.Module, precision: Precision) -> None:
    """Use TF32 for the matrix products of the loss in bf16 runs: 10-bit mantissas, fp32 sums, several times faster.

    Embeddings computed in bf16 have 8 significant bits, so nothing is lost. TF32 is limited to the loss, because rotary
    position embeddings are fp32 products as well, and angles of position 3000 rounded to 11 bits are other positions.

    The forward pass of a loss contains its large products and their gradients. The previous setting is restored after
    each pass. This setting of torch 2.9 and later must not be mixed with the earlier ones: torch and torch.compile
    raise while it is in force.
    """
    if precision is not Precision.bf16:
        return
    previous: list[str] = []

    def enable(*_: object) -> None:
        previous.append(torch.backends.cuda.matmul.fp32_precision)
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def restore(*_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = previous.pop()

    loss.register_forward_pre_hook(enable)
    loss.register_forward_hook(restore, always_call=True)


def build_loss(
    recipe: Recipe,
    losses: Sequence[LossConfig],
    data: TrainData,
    model: LoadedModel,
    guides: Mapping[str, GuideModel],
    world: World,
    console: Console,
) -> Loss:
    """The loss of all sources, on this rank's device. Prints notes about it."""
    with world.fail_together("building the loss"):
        dimension, guide_dimensions = model.encoder.dimension, _guide_dimensions(guides, data)
        loss = build_losses(losses, dimension=dimension, guide_dimensions=guide_dimensions, seed=recipe.seed)
        loss = loss.to(world.device)
    use_tf32_products(loss, recipe.parallel.precision)
    for note in loss_notes(losses, data.names, loss, dimension):
        console.note(note)
    return loss


def _guide_dimensions(guides: Mapping[str, GuideModel], data: TrainData) -> list[dict[str, int]]:
    """For each source: dimensions of the guides' embeddings, and of the vectors in its rows."""
    dimensions = {path: guide.dimension for path, guide in guides.items()}
    in_rows = [data.teacher_dimension(source) for source in range(len(data.stores))]
    return [dimensions if width is None else {**dimensions, FROM_ROWS: width} for width in in_rows]
