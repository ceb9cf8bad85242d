"""One vector per text from its token vectors; padding may stand on either side.

Shapes: N texts, L tokens, H hidden size.
"""

import torch
from torch import Tensor

from embedtrain.config.schema import Pooling


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


def _take(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), places]
