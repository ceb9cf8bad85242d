"""What a run saves, and when."""

from dataclasses import dataclass
from enum import Enum


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

    every: int = 0  # steps between checkpoints; 0: by time, see `every_minutes`
    every_minutes: float = 30.0  # minutes between checkpoints if `every=0` and `contents=all`; 0: only at the end
    keep: int = 2  # the newest checkpoints to keep, besides the best one
    keep_every: int = 0  # checkpoints at multiples of so many steps are never deleted; 0: none
    asynchronous: bool = True  # write while training continues, from a copy in host memory; false: training waits
    max_disk_gb: float | None = None  # limit for all checkpoints together, in 10^9 bytes; checked before each
    layout: CheckpointLayout = CheckpointLayout.sharded
    contents: CheckpointContents = CheckpointContents.all
    best_metric: str | None = None  # set/metric, such as dev/ndcg@10: keep and export the checkpoint that is best by it

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
