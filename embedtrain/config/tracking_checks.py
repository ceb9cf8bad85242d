"""Which options of `tracking` cannot work, found before a model is loaded."""

from embedtrain.config.schema import Recipe
from embedtrain.errors import ConfigError

# A trace holds every operator of its steps, in memory until they are over.
MOST_PROFILED = 10


def check_tracking(recipe: Recipe) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: an upload without wandb, or steps or ranks to profile that there cannot be.
    """
    tracking = recipe.tracking
    if tracking.wandb_artifacts and not tracking.wandb:
        raise ConfigError("tracking.wandb_artifacts=true uploads the model to wandb: write tracking.wandb=true as well")
    steps, ranks = tracking.profile, tracking.profile_ranks
    if any(step < 1 for step in steps):
        raise ConfigError(f"tracking.profile={steps}: numbers of steps, counted from 1")
    if len(set(steps)) > MOST_PROFILED:
        raise ConfigError(
            f"tracking.profile has {len(set(steps))} steps: at most {MOST_PROFILED}, for every operator of them is kept"
        )
    if steps and recipe.train.steps is not None and max(steps) > recipe.train.steps:
        raise ConfigError(f"tracking.profile={steps}: train.steps={recipe.train.steps} is the last step")
    if ranks is not None and (not ranks or any(rank < 0 for rank in ranks)):
        raise ConfigError(f"tracking.profile_ranks={ranks}: numbers of ranks, counted from 0; null is all of them")
