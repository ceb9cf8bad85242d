"""Tokens of several texts, one text after the other -> one chunk, padded or packed."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from embedtrain.data.types import Packing, Tokens


def padded(ids: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int], padding: int) -> Tokens:
    """Texts as one chunk, N texts padded to the longest of them.

    Padding stands on the right whatever the tokenizer prefers: pooling reads the mask, and models with learned
    positions count them from the left.

    Args:
        ids: the tokens of all texts, one text after the other: int [sum of lengths]. One that does not count in its
            text's vector is its complement, `~id`, and so negative: it needs no room of its own on the way here.
        lengths: of each text, int64 [N].
        rows: where each text stands in the list it is from, [N].
        padding: the id that is put where no token is.
    """
    mask = np.arange(max(1, int(lengths.max(initial=0)))) < lengths[:, None]
    filled = np.full(mask.shape, padding, dtype=np.int64)
    filled[mask] = ids
    left_out = filled < 0
    pooled = torch.from_numpy((mask & ~left_out).astype(np.int64)) if left_out.any() else None
    filled[left_out] = ~filled[left_out]
    return Tokens(torch.from_numpy(filled), torch.from_numpy(mask.astype(np.int64)), tuple(rows), pooled)


def packed(ids: NDArray[np.int32], lengths: NDArray[np.int64], rows: Sequence[int]) -> Tokens:
    """Texts as one chunk, one after another in one row [1, T]: not a token more than they have.

    Args:
        ids: as for `padded`.
        lengths: of each text, at least one token; like lengths side by side, for they are computed together.
        rows: as for `padded`.
    """
    flat = ids.astype(np.int64)[None, :]
    left_out = flat < 0
    pooled = torch.from_numpy((~left_out).astype(np.int64)) if left_out.any() else None
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(flat.shape[1]) - np.repeat(starts[:-1], lengths)
    packing = Packing(
        tuple(lengths.tolist()), torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(positions[None, :])
    )
    tokens = torch.from_numpy(np.where(left_out, ~flat, flat))
    return Tokens(tokens, torch.ones_like(tokens), tuple(rows), pooled, packing)
