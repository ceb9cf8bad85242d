"""Options of low-rank adapters (Hu et al., "LoRA", 2021; Dettmers et al., "QLoRA", 2023), an element of `model`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

ALL_LINEAR = "all-linear"


class FrozenDtype(str, Enum):
    """What frozen weights are held in.

    `auto` is bf16 where the model is computed in bf16, for then nothing is lost, or where its files hold bf16; else
    fp32.
    """

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen model, by PEFT; off unless `rank` or `path` is set."""

    rank: int | None = None  # r, of every adapter; null: all weights are trained
    alpha: float | None = None  # an adapter counts alpha / r times; default: 2 r
    targets: Any = ALL_LINEAR  # all-linear (of the blocks), or names of linear layers, such as [q_proj, v_proj]
    dropout: float = 0.0  # before an adapter
    train: list[str] = field(default_factory=list)  # trained whole besides: embeddings, norms, or names of modules
    frozen: FrozenDtype = FrozenDtype.auto  # type of the weights that are not trained
    four_bit: bool = False  # frozen linear layers in 4 bits (QLoRA): CUDA, bitsandbytes
    path: str | None = None  # go on from an adapter of PEFT's: directory or Hub id; its rank and targets are taken
    revision: str | None = None  # a commit, tag or branch of its Hub repository

    @property
    def on(self) -> bool:
        """Whether adapters are trained, and not the model itself."""
        return self.rank is not None or self.path is not None
