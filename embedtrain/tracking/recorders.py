"""Which trackers a recipe asks for besides the terminal and metrics.jsonl."""

from collections.abc import Callable, Mapping
from pathlib import Path

from embedtrain.config.schema import Recipe
from embedtrain.tracking import event_files, weights_and_biases
from embedtrain.tracking.aside import Aside
from embedtrain.tracking.event_files import TensorBoardRun
from embedtrain.tracking.weights_and_biases import WandbRun


def recorders(
    recipe: Recipe,
    world_size: int,
    run_dir: Path,
    resumed_step: int | None,
    wandb_id: str | None,
    measured: Mapping[int, Mapping[str, Mapping[str, float]]],
    warn: Callable[[str], None],
) -> list[Aside]:
    """Start them. On rank 0 alone.

    Args:
        recipe: its `tracking` says which.
        world_size: number of ranks.
        run_dir: where they write.
        resumed_step: the step training goes on from; None: it starts anew.
        wandb_id: what continues the wandb run.
        measured: evaluations before this start, as step -> set -> metric -> value.
        warn: says a sentence to the user.
    """
    started = []
    if recipe.tracking.wandb:
        started.append(
            Aside(
                "wandb",
                lambda: WandbRun(recipe, world_size, run_dir, wandb_id, measured),
                warn,
                start=weights_and_biases.start_seconds(),
                finish=weights_and_biases.finish_seconds(recipe),
                abandon=weights_and_biases.abandon,
            )
        )
    if recipe.tracking.tensorboard:
        started.append(
            Aside(
                "TensorBoard",
                lambda: TensorBoardRun(recipe, run_dir, resumed_step),
                warn,
                start=event_files.START,
                finish=event_files.FINISH,
            )
        )
    return started
