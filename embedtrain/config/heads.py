"""Options of new dense heads, which a model has after its pooling and before the normalisation."""

from dataclasses import dataclass
from enum import Enum


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
