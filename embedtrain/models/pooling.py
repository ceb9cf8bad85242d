"""One vector per text from its token vectors; padding may stand on either side, or nowhere.

Shapes: N texts, L tokens, T tokens of all texts, H hidden size.
"""

import torch
from torch import Tensor

from embedtrain.config.schema import Pooling
from embedtrain.data.types import Packing


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool token vectors [N, L, H] with mask [N, L] (1 = real) to float32 [N, H].

    Where the first and the last real token stand is read from the mask: a fixed index would take a padding
    token's vector in half of the batches, in silence.
    """
    match pooling:
        case Pooling.cls:
            return _take(hidden, mask.argmax(dim=1)).float()
        case Pooling.last:
            places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            return _take(hidden, (mask * places).argmax(dim=1)).float()
        case Pooling.mean:
            weights = mask.unsqueeze(-1).float()
            return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def pool_packed(hidden: Tensor, counts: Tensor | None, packing: Packing, pooling: Pooling) -> Tensor:
    """Pool token vectors [T, H] of texts that stand one after another to float32 [N, H].

    Args:
        hidden: of all tokens.
        counts: int64 [T], 1 where a token counts; None: all do. What does not count stands at a text's beginning.
        packing: where the texts lie.
        pooling: as for `pool`.
    """
    starts = packing.starts.long()
    match pooling:
        case Pooling.cls:
            skipped = 0 if counts is None else starts.diff() - _sums(counts[:, None].float(), packing)[:, 0].long()
            return hidden[starts[:-1] + skipped].float()
        case Pooling.last:
            return hidden[starts[1:] - 1].float()
        case Pooling.mean:
            sums, weights = hidden.float(), starts.diff().unsqueeze(-1).float()
            if counts is not None:
                sums, weights = sums * counts.unsqueeze(-1), _sums(counts.unsqueeze(-1).float(), packing)
            means: Tensor = _sums(sums, packing) / weights
            return means


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sums(rows: Tensor, packing: Packing) -> Tensor:
    """The sum of each text's rows, [T, H] to [N, H], the same to the bit every time."""
    if rows.is_cuda:
        return torch.segment_reduce(rows, "sum", lengths=packing.starts.diff().long(), axis=0, unsafe=True)
    runs = packing.runs
    parts = rows.split([texts * length for texts, length in runs])
    return torch.cat([part.view(n, length, -1).sum(1) for part, (n, length) in zip(parts, runs, strict=True)])


def _take(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), places]
