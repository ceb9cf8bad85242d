"""The types that flow from files to the encoder: Example, GlobalBatch, Tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Example:
    """One training row as every reader yields it: texts without prompts.

    `source` is the index in `data.train` of where it came from; `line` its line or row number there,
    counted from 1; `file` the file's path or the Hub id.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    source: int
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one step uses of an Example: prompts are in the texts, one positive and the negatives are drawn."""

    query: str
    documents: tuple[str, ...]  # the positive first, then the hard negatives


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one step over all ranks, in an order that does not depend on the number of ranks.

    `rows` may make its elements when they are asked for, so that a rank pays for its share alone.
    """

    step: int  # counted from 0
    rows: Sequence[Row]

    def share(self, rank: int, size: int) -> tuple[Row, ...]:
        """The rows that rank `rank` of `size` works on: every `size`-th, so shares differ by one at most."""
        return tuple(self.rows[rank::size])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Texts ready for the encoder: N texts padded to L tokens.

    Attributes:
        ids: int64 [N, L].
        mask: int64 [N, L], 1 where a token is real. Padding may be on either side.
        rows: where each text stood in the list it was made from; -1 is a dummy whose vector is dropped.
    """

    ids: Tensor
    mask: Tensor
    rows: tuple[int, ...]

    def to(self, device: torch.device) -> "Tokens":
        """The same tokens on `device`."""
        return Tokens(self.ids.to(device, non_blocking=True), self.mask.to(device, non_blocking=True), self.rows)

    @property
    def num_real(self) -> int:
        """Real tokens, padding not counted."""
        return int(self.mask.sum())
