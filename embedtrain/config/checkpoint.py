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

    every: int = 0  # steps; 0: only at the end
    keep: int = 2  # the newest checkpoints to keep, besides the best one
    keep_every: int = 0  # checkpoints at multiples of so many steps are never deleted; 0: none
    asynchronous: bool = True  # write while training continues, from a copy in host memory; false: training waits
    max_disk_gb: float | None = None  # limit for all checkpoints together, in 10^9 bytes; checked before each
    layout: CheckpointLayout = CheckpointLayout.sharded
    contents: CheckpointContents = CheckpointContents.all
    best_metric: str | None = None  # set/metric, such as dev/ndcg@10: keep and export the checkpoint that is best by it
