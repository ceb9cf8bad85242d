"""What a run saves, and when."""

from dataclasses import dataclass
from enum import Enum

from embedtrain.config.options import Effect, option


class CheckpointLayout(str, Enum):
    """`sharded`: one file per shard. `full`: one safetensors file of whole tensors; each rank writes its rows to it."""

    sharded = "sharded"
    full = "full"


class CheckpointContents(str, Enum):
    """`all`: weights and optimizer state, to resume from. `model`: only weights, to start a new run from."""

    all = "all"
    model = "model"


class WeightsOf(str, Enum):
    """Which weights of a checkpoint are read: those that were trained, or their moving average (`optim.ema`)."""

    trained = "trained"
    ema = "ema"


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is saved and when."""

    # steps between checkpoints; 0: by time, see `every_minutes`
    every: int = option(0, at_least=0, hint="0 saves by time (checkpoint.every_minutes)")
    # minutes between checkpoints if `every=0` and `contents=all`; 0: only at the end
    every_minutes: float = option(30.0, at_least=0, hint="0 saves at the end only")
    # the newest checkpoints to keep, besides the best one
    keep: int = option(2, at_least=1, hint="training resumes from a checkpoint")
    # checkpoints at multiples of so many steps are never deleted; 0: none
    keep_every: int = option(0, at_least=0, hint="0 keeps none for good")
    asynchronous: bool = True  # write while training continues, from a copy in host memory; false: training waits
    # limit for all checkpoints together, in 10^9 bytes; checked before each
    max_disk_gb: float | None = option(None, above=0, hint="null sets no limit")
    layout: CheckpointLayout = CheckpointLayout.sharded
    contents: CheckpointContents = CheckpointContents.all
    # set/metric, such as dev/ndcg@10: keep and export the checkpoint that is best by it
    best_metric: str | None = option(None, resume=Effect.changes_training)

    @property
    def minutes(self) -> float:
        """Minutes between checkpoints that are saved by time; 0: none are.

        Those without optimizer state are not: a run that is started again would begin anew from the weights of one.
        """
        by_time = self.every == 0 and self.contents is CheckpointContents.all
        return self.every_minutes if by_time else 0.0

    @property
    def moments(self) -> str:
        """When checkpoints are saved, for the user."""
        moments = ["at the end"]
        if self.best_metric is not None:
            moments.insert(0, "after a better evaluation")
        if self.every or self.minutes:
            moments.insert(0, f"every {self.every:,} steps" if self.every else f"every {self.minutes:g} minutes")
        return ", ".join(moments)
