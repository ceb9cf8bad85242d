"""What a run minimises: the losses of its sources on the device, told to the user."""

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
    """Let the loss's forward pass, which holds its large products and their gradients, use TF32 in bf16 runs.

    The setting is that of torch 2.9 and later; what was set before is set again after each pass. (Both ways to set it
    must not be mixed: torch refuses, and so does torch.compile, while this one is in force.)
    """
    if precision is not Precision.bf16:
        return
    before: list[str] = []

    def begin(*_: object) -> None:
        before.append(torch.backends.cuda.matmul.fp32_precision)
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def end(*_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = before.pop()

    loss.register_forward_pre_hook(begin)
    loss.register_forward_hook(end, always_call=True)


def build_loss(
    recipe: Recipe,
    losses: Sequence[LossConfig],
    data: TrainData,
    model: LoadedModel,
    guides: Mapping[str, GuideModel],
    world: World,
    console: Console,
) -> Loss:
    """The loss of all sources, on this rank's device, and what is to be said of it.

    Raises:
        ConfigError: on every rank alike, options do not fit the model or the rows' vectors.
    """
    with world.fail_together("making the loss"):
        dimension, others = model.encoder.dimension, _guide_dimensions(guides, data)
        loss = build_losses(losses, dimension=dimension, guide_dimensions=others, seed=recipe.seed).to(world.device)
    use_tf32_products(loss, recipe.parallel.precision)
    for note in loss_notes(losses, data.names, loss, dimension):
        console.note(note)
    return loss


def _guide_dimensions(guides: Mapping[str, GuideModel], data: TrainData) -> list[dict[str, int]]:
    """For each source the widths of other models' vectors, and of those that its rows hold."""
    widths = {path: guide.dimension for path, guide in guides.items()}
    of_rows = [data.teacher_dimension(source) for source in range(len(data.stores))]
    return [widths if width is None else {**widths, FROM_ROWS: width} for width in of_rows]
