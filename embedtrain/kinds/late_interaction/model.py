"""The head of late-interaction models: a normalised vector of each token (ColBERT).

R: tokens that have a vector; L: tokens of a padded text; T: tokens of all packed texts; D: dimensions of the vectors.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk
from embedtrain.models.encoder import Dense, Encoder, PooledHead

_TOLERANCE = 5e-2  # between vectors of length 1, also in bf16


class TokenVectorHead(PooledHead):
    """The vectors of tokens: projections, L2 normalisation."""

    compares_tokens = True

    def __init__(self, size: int, dense: Sequence[Dense]) -> None:
        super().__init__(size, Pooling.cls, normalize=True, dense=dense)

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The vectors of the tokens that have one, [R, D].

        Without `token_rows` these are the ones that `pooled` selects, or all real ones.
        """
        mask, pooled, token_rows = chunk.known_mask, chunk.pooled, chunk.token_rows
        selected = pooled if mask is None else mask if pooled is None else pooled * mask
        if token_rows is None and selected is not None:
            token_rows = selected.flatten().nonzero()[:, 0]
        flat = hidden.flatten(0, 1)
        return (self.transformed(flat if token_rows is None else flat[token_rows]),)

    def graph_outputs(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """The vectors of all tokens, [N, L, D]."""
        return (self.transformed(hidden),)

    @property
    def beside_adapters(self) -> dict[str, nn.Module]:
        """The projection."""
        return {"dense": self.dense}


def expansion_mismatch(encoder: Encoder, device: torch.device) -> str | None:
    """Why expansion tokens that no token attends to cannot be used with padded texts; None if they can.

    DeBERTa has no attention at all for such tokens: their vectors are a mean over a text and its padding. Two forward
    passes without gradient, which are collectives if the encoder is sharded: every rank must call.
    """
    num_attended, length, padding = 3, 5, 4
    ids = torch.arange(5, 5 + length, device=device)[None]
    mask = (torch.arange(length, device=device) < num_attended).long()[None]
    rows = torch.arange(length, device=device)
    with torch.no_grad():
        (alone,) = encoder(Chunk(ids, mask, token_rows=rows))
        (padded,) = encoder(Chunk(F.pad(ids, (0, padding)), F.pad(mask, (0, padding)), token_rows=rows))
    difference = float((alone - padded).norm(dim=1).max())
    return None if difference <= _TOLERANCE else f"their vectors depend on padding (they differ by {difference:.1%})"
