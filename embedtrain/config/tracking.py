"""What the terminal shows, and where metrics are logged."""

from dataclasses import dataclass, field
from enum import Enum


class WandbMode(str, Enum):
    """Where wandb logs to: its server, or files that `wandb sync` uploads later."""

    online = "online"
    offline = "offline"


@dataclass(kw_only=True)
class TrackingConfig:
    """What the terminal shows, and where metrics are logged besides the terminal and metrics.jsonl."""

    wandb: bool = False  # log to Weights & Biases
    wandb_mode: WandbMode | None = None  # default: $WANDB_MODE, else online
    wandb_project: str = "embedtrain"  # project
    wandb_entity: str | None = None  # user or team; default: yours
    wandb_group: str | None = None  # group of runs
    wandb_name: str | None = None  # name of the run; default: name
    wandb_tags: list[str] = field(default_factory=list)  # tags of the run
    wandb_notes: str | None = None  # description of the run
    wandb_artifacts: bool = False  # upload the exported model
    tensorboard: bool = False  # write event files to `tensorboard/` in the run directory
    # Print diagnostics of every logged step as well: padding, waiting, communication, similarities, all metrics of the
    # loss.
    verbose: bool = False
    geometry: bool = True  # similarities of positives, of the hardest negatives, ... of every logged batch
    profile: list[int] = field(default_factory=list)  # steps to trace, such as [10,11,12]
    profile_ranks: list[int] | None = field(default_factory=lambda: [0])  # ranks that write traces; null: all
    report: bool = True  # write report.html at the end, for which a few texts are encoded before and after
