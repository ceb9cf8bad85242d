"""The late-interaction encoder: backbone and projection in one module, tokens to a normalised vector each (ColBERT).

R: tokens that have a vector; L: tokens of a padded text; T: tokens of all packed texts; D: dimensions of the vectors.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk
from embedtrain.models.encoder import Dense, Encoder

_TOLERANCE = 5e-2  # between vectors of length 1, also in bf16


class LateInteractionEncoder(Encoder):
    """Tokens of texts to vectors of tokens: a Hugging Face model without a head, projections, L2 normalisation."""

    def __init__(self, backbone: PreTrainedModel, dense: Sequence[Dense]) -> None:
        super().__init__(backbone, Pooling.cls, normalize=True, dense=dense)

    def forward(self, chunk: Chunk) -> Tensor:
        """The tokens of a chunk that have a vector to float32 vectors [R, D].

        Without `token_rows` these are the ones that `pooled` selects, or all real ones.
        """
        hidden, mask, pooled, token_rows = self.hidden_states(chunk), chunk.known_mask, chunk.pooled, chunk.token_rows
        selected = pooled if mask is None else mask if pooled is None else pooled * mask
        if token_rows is None and selected is not None:
            token_rows = selected.flatten().nonzero()[:, 0]
        flat = hidden.flatten(0, 1)
        return self.token_vectors(flat if token_rows is None else flat[token_rows])

    def vectors(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Apply the projection to the token vectors [N, L, H] that the mask [N, L] selects: [R, D]."""
        return self.token_vectors(hidden[mask.bool()])

    def token_vectors(self, hidden: Tensor) -> Tensor:
        """Project and normalise token vectors [..., H]: [..., D]."""
        return self._apply_heads(hidden)


def expansion_mismatch(encoder: LateInteractionEncoder, device: torch.device) -> str | None:
    """Why expansion tokens that no token attends to cannot be used with padded texts; None if they can.

    DeBERTa has no attention at all for such tokens: their vectors are a mean over a text and its padding. Two forward
    passes without gradient, which are collectives if the encoder is sharded: every rank must call.
    """
    num_attended, length, padding = 3, 5, 4
    ids = torch.arange(5, 5 + length, device=device)[None]
    mask = (torch.arange(length, device=device) < num_attended).long()[None]
    rows = torch.arange(length, device=device)
    with torch.no_grad():
        alone = encoder(Chunk(ids, mask, token_rows=rows))
        padded = encoder(Chunk(F.pad(ids, (0, padding)), F.pad(mask, (0, padding)), token_rows=rows))
    difference = float((alone - padded).norm(dim=1).max())
    return None if difference <= _TOLERANCE else f"their vectors depend on padding (they differ by {difference:.1%})"
