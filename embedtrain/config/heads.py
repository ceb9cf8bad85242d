"""Options of new dense heads, which a model has after its pooling and before the normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from embedtrain.config.validation import OptionChecks


class HeadActivation(str, Enum):
    """The function after a head's linear layer; `identity`: none."""

    identity = "identity"
    tanh = "tanh"
    gelu = "gelu"
    silu = "silu"


class HeadInit(str, Enum):
    """Initial weights of a head; a bias starts at 0.

    `identity`: the first rows of the identity matrix, so that heads without an activation whose last has as many
    outputs as the pooling leave the vectors as they were. `normal`: of mean 0 and standard deviation 1 / sqrt(inputs).
    """

    identity = "identity"
    normal = "normal"


@dataclass(kw_only=True)
class HeadConfig:
    """A new dense head, an element of `model.heads`."""

    out: int  # dimensions of its output; that of the last head is the dimension of the vectors
    bias: bool = False  # whether a trained vector is added
    activation: HeadActivation = HeadActivation.identity
    init: HeadInit = HeadInit.identity


def check_heads(heads: Sequence[HeadConfig], *, kind: str, exports_adapter: bool) -> None:
    """Raise a ConfigError for heads that cannot work, as far as it shows before the model is opened.

    Args:
        heads: `model.heads`.
        kind: `model.kind`.
        exports_adapter: whether `export.formats` has `adapter`.
    """
    for index, head in enumerate(heads):
        check = OptionChecks(head, f"model.heads[{index}].")
        check.require(
            kind == "dense",
            "out",
            f"is for model.kind=dense, not {kind}; leave model.heads out, or write model.heads=[] where a recipe "
            "sets it",
        )
        check.at_least(1, "out")
        check.require(
            not exports_adapter,
            "out",
            "PEFT's adapter format cannot hold the heads behind the pooling; leave adapter out of export.formats "
            "(the merged model has them)",
        )
