"""What a run minimises: the losses of its sources on the device, told to the user."""

from collections.abc import Mapping, Sequence

from embedtrain.config.losses import LossConfig
from embedtrain.config.schema import Recipe
from embedtrain.data.batches import TrainData
from embedtrain.distributed.world import World
from embedtrain.losses.choose import choose_losses, notes_on
from embedtrain.losses.types import FROM_ROWS, Loss
from embedtrain.tracking.console import Console
from embedtrain.training.guide import GuideModel
from embedtrain.training.model import LoadedModel
from embedtrain.training.tensor_float import products_in_tf32


def make_loss(
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
    with world.together("making the loss"):
        dimension, others = model.encoder.dimension, _guide_dimensions(guides, data)
        loss = choose_losses(losses, dimension=dimension, guide_dimensions=others, seed=recipe.seed).to(world.device)
    products_in_tf32(loss, recipe.parallel.precision)
    for note in notes_on(losses, data.names, loss, dimension):
        console.note(note)
    return loss


def _guide_dimensions(guides: Mapping[str, GuideModel], data: TrainData) -> list[dict[str, int]]:
    """For each source the widths of other models' vectors, and of those that its rows hold."""
    widths = {path: guide.dimension for path, guide in guides.items()}
    of_rows = [data.teacher_dimension(source) for source in range(len(data.stores))]
    return [widths if width is None else {**widths, FROM_ROWS: width} for width in of_rows]
