"""Which way an encoder's tokens look, asked of the encoder itself."""

from collections.abc import Callable

import torch
from torch import Tensor

# Of a vector's length. The same token in two rows of one batch has the same vector to the last bits.
_NOTHING = 1e-5

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def sees_ahead(encoder: Forward, ids: tuple[int, int, int], device: torch.device) -> bool | None:
    """Whether a text's first token sees the second; None where it does beside padding alone, or without alone.

    Two texts that differ in their second token, and what is made of their first tokens. Once without padding and once
    with it, for models make masks in one way or the other, and some look another way then. Two forward passes without
    gradient, collectives if the encoder is sharded: every rank must call.

    Args:
        encoder: ids, mask and the mask of tokens that count, all int64 [N, L], to vectors [N, D]; without dropout.
        ids: tokens that the model knows: the first, and two different ones for the second.
        device: where it computes.
    """
    first, *seconds = ids
    found = [_differ(encoder, [[first, second, first][:length] for second in seconds], device) for length in (2, 3)]
    return found[0] if found[0] == found[1] else None


def _differ(encoder: Forward, rows: list[list[int]], device: torch.device) -> bool:
    """Whether the first tokens of two texts of two tokens have two vectors; what follows the two is padding."""
    ids = torch.tensor(rows, device=device)
    places = torch.arange(ids.shape[1], device=device).expand_as(ids)
    with torch.no_grad():
        one, other = encoder(ids, (places < 2).long(), (places < 1).long()).float()
    return bool((one - other).norm() > _NOTHING * one.norm())
