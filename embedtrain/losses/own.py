"""InfoNCE without in-batch negatives: each query against its own documents, in groups of any size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import Hardness, InfoNCEConfig
from embedtrain.losses.negatives import NoNegatives
from embedtrain.losses.scores import guide_ceilings, rounding
from embedtrain.losses.softmax import RowLosses
from embedtrain.losses.types import BatchInfo, Guide


def limits(queries: Tensor, positives: Tensor, scale: Tensor, config: InfoNCEConfig) -> tuple[Tensor, Tensor | None]:
    """Of each row [B]: the score that beats its positive, and the score above which nothing is a negative, or None.

    Args:
        queries: [B, D], without gradient.
        positives: [B, D], likewise.
        scale: one over the temperature, [1].
        config: the loss's options.
    """
    similarity = (queries * positives).sum(dim=1)
    room = rounding(similarity) * queries.norm(dim=1) * positives.norm(dim=1)
    ceilings = (
        None if config.false_negative_margin is None else (similarity + config.false_negative_margin + room) * scale
    )
    return (similarity - config.margin - room) * scale, ceilings


def own_negatives(
    queries: Tensor,
    documents: Tensor,
    batch_info: BatchInfo,
    guide: Guide | None,
    scale: Tensor,
    config: InfoNCEConfig,
    counts: tuple[list[int], list[int]],
) -> RowLosses:
    """Queries [B, D] and documents [M, D]; of other ranks only the texts' keys are asked. Every rank must call it."""
    owners, positives = batch_info.owners, batch_info.positives
    similarity = (queries[owners] * documents).sum(dim=1)
    right = similarity[positives]
    scores = similarity * scale
    beaten_from, ceilings = limits(queries.detach(), documents[positives].detach(), scale.detach(), config)
    excluded = torch.zeros(len(owners), dtype=torch.bool, device=owners.device)
    excluded[positives] = True
    for answers in NoNegatives(batch_info, counts, duplicates=config.mask_duplicates, positive_again=False).answers():
        excluded |= answers
    if ceilings is not None:
        excluded |= scores.detach() > ceilings[owners]
    if guide is not None:
        found = (guide.queries[owners] * guide.documents).sum(dim=1)
        excluded |= found > guide_ceilings(found[positives], config.guide_margin, config.guide_margin_kind)[owners]
    if config.hardness in (Hardness.hard, Hardness.all):
        scores = scores + config.hardness_strength * similarity.detach()
    scores = scores.masked_fill(excluded, -torch.inf)
    highest = group_maximum(scores.detach(), owners, len(queries))
    gap = group_logsumexp(scores, owners, len(queries)) - (right - config.margin) * scale
    loss = F.softplus(gap.masked_fill(highest == -torch.inf, -torch.inf)).sum()
    return RowLosses(loss, (highest < beaten_from).sum())


def group_maximum(values: Tensor, owners: Tensor, num_groups: int) -> Tensor:
    """The largest value [M] of each group, [num_groups]; -inf for a group without any."""
    return values.new_full((num_groups,), -torch.inf).scatter_reduce(0, owners, values, "amax")


def group_logsumexp(values: Tensor, owners: Tensor, num_groups: int) -> Tensor:
    """Logsumexp of the values [M] of each group, [num_groups]; a group of -inf alone gives 0 and no gradient."""
    highest = group_maximum(values.detach(), owners, num_groups)
    level = highest.masked_fill(highest == -torch.inf, 0.0)
    mass = torch.zeros_like(level).index_add(0, owners, (values - level[owners]).exp())
    return level + mass.masked_fill(highest == -torch.inf, 1.0).log()
