"""InfoNCE without in-batch negatives: each query against its own documents, in groups of any size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import Hardness, InfoNCEConfig, Margin
from embedtrain.losses.softmax import RowLosses
from embedtrain.losses.types import Guide, LossInput


def own_negatives(
    queries: Tensor, documents: Tensor, known: LossInput, guide: Guide | None, scale: Tensor, config: InfoNCEConfig
) -> RowLosses:
    """Queries [B, D] and documents [M, D]; nothing is exchanged with other ranks."""
    owners, positives = known.owners, known.positives
    similarity = (queries[owners] * documents).sum(dim=1)
    right = similarity[positives]
    excluded = torch.zeros(len(owners), dtype=torch.bool, device=owners.device)
    excluded[positives] = True
    if config.mask_duplicates:
        for keys in (known.document_keys, known.document_ids):
            if keys is not None:
                excluded |= keys == keys[positives][owners]
    if config.drop_above is not None:
        excluded |= similarity.detach() > right.detach()[owners] + config.drop_above
    if guide is not None:
        found = (guide.queries[owners] * guide.documents).sum(dim=1)
        best = found[positives]
        slack = config.guide_margin * (best.abs() if config.guide_margin_kind is Margin.relative else 1.0)
        excluded |= found > (best - slack)[owners]
    scores = similarity * scale
    if config.hardness in (Hardness.hard, Hardness.all):
        scores = scores + config.hardness_strength * similarity.detach()
    scores = scores.masked_fill(excluded, -torch.inf)
    highest = group_maximum(scores.detach(), owners, len(queries))
    gap = group_logsumexp(scores, owners, len(queries)) - (right - config.margin) * scale
    loss = F.softplus(gap.masked_fill(highest == -torch.inf, -torch.inf)).sum()
    return RowLosses(loss, (highest < ((right - config.margin) * scale).detach()).sum())


def group_maximum(values: Tensor, owners: Tensor, num_groups: int) -> Tensor:
    """The largest value [M] of each group, [num_groups]; -inf for a group without any."""
    return values.new_full((num_groups,), -torch.inf).scatter_reduce(0, owners, values, "amax")


def group_logsumexp(values: Tensor, owners: Tensor, num_groups: int) -> Tensor:
    """Logsumexp of the values [M] of each group, [num_groups]; a group of -inf alone gives 0 and no gradient."""
    highest = group_maximum(values.detach(), owners, num_groups)
    level = highest.masked_fill(highest == -torch.inf, 0.0)
    mass = torch.zeros_like(level).index_add(0, owners, (values - level[owners]).exp())
    return level + mass.masked_fill(highest == -torch.inf, 1.0).log()
