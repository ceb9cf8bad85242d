"""InfoNCE over the in-batch and hard negatives of all ranks, with the exact gradient of the global batch.

B, M: queries and documents of this rank; N, K: of all ranks; D: dimensions.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import Implementation, InfoNCEConfig, PartitionMode, Similarity
from embedtrain.distributed.collectives import gather_rows, row_counts
from embedtrain.losses.negatives import NoNegatives
from embedtrain.losses.own import limits, own_negatives
from embedtrain.losses.ring import around_ring
from embedtrain.losses.scores import QUERY_CANDIDATES, Candidates, Rows, Rules, guide_ceilings
from embedtrain.losses.similarity import widened
from embedtrain.losses.softmax import RowLosses, plain, tiled
from embedtrain.losses.temperature import Temperature
from embedtrain.losses.types import BatchInfo, Guide, Loss, LossOutput

# Below so many bytes of scores the plain way is as good as any, and simplest.
PLAIN_BYTES = 1 << 26
# Above so many bytes of other ranks' candidates and their gradient they are not all held at a time.
GATHERED_BYTES = 1 << 31


class InfoNCE(Loss):
    """van den Oord et al., "Representation Learning with Contrastive Predictive Coding" (2018).

    The loss of query i is -log softmax, at its positive, of the scores <q_i, d_j> / temperature over the
    documents of all ranks; see `softmax` for the formula and its options for what else may be scored (Li et
    al., 2023, "GTE"), left out (Solatorio, 2024, "GISTEmbed"; Zhang et al., 2025, "Qwen3 Embedding") or
    weighted (Lan et al., 2025, "LLaVE"). Any number of hard negatives per query, any number of rows per rank;
    each rank scores its own rows only, so its work grows with B x K.

    Args:
        config: see there.
    """

    def __init__(self, config: InfoNCEConfig) -> None:
        super().__init__()
        self.config = config
        self.temperature = Temperature(
            config.temperature, trained=config.learn_temperature, bounds=config.temperature_bounds
        )
        joint = config.partition_mode is PartitionMode.joint
        self.parts = [config.directions] if joint else [[side] for side in config.directions]

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """See Loss. A row without any negative has loss 0."""
        # The products must not be rounded to bf16: logits of 50 would be off by a quarter.
        with torch.autocast(queries.device.type, enabled=False):
            return self._forward(widened(queries), widened(documents), batch_info)

    def _forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        if self.config.similarity is Similarity.cosine:
            queries, documents = F.normalize(queries, dim=1), F.normalize(documents, dim=1)
        scale = self.temperature.scale(queries)
        guide = None if self.config.guide is None else _normalised(batch_info.guides[self.config.guide])
        counts = row_counts(len(queries), queries.device), row_counts(len(documents), queries.device)
        if self.config.in_batch_negatives:
            found = self._in_batch(queries, documents, batch_info, guide, scale, counts)
        else:
            found = own_negatives(queries, documents, batch_info, guide, scale, self.config, counts)
        num_rows = max(1, sum(counts[0]))
        metrics = {"accuracy": found.right / num_rows}
        if self.temperature.log_scale is not None:
            metrics["temperature"] = 1.0 / (scale.detach().squeeze() * dist.get_world_size())
        return LossOutput(found.loss / num_rows, metrics)

    def _in_batch(
        self,
        queries: Tensor,
        documents: Tensor,
        batch_info: BatchInfo,
        guide: Guide | None,
        scale: Tensor,
        counts: tuple[list[int], list[int]],
    ) -> RowLosses:
        config, rank = self.config, dist.get_rank()
        positives = batch_info.positives
        rules = Rules(
            no_negatives=NoNegatives(
                batch_info,
                counts,
                duplicates=config.mask_duplicates,
                positive_again=config.partition_mode is PartitionMode.joint,
            ),
            hardness=config.hardness,
            hardness_strength=config.hardness_strength,
        )
        answers = documents[positives]
        beaten_from, ceilings = limits(queries.detach(), answers.detach(), scale.detach(), config)
        seen = None if guide is None else guide.documents[positives]
        rows = Rows(
            places=torch.arange(len(queries), device=queries.device) + sum(counts[0][:rank]),
            queries=queries,
            positives=answers,
            beaten_from=beaten_from,
            ceilings=ceilings,
            guide_queries=None if guide is None else guide.queries,
            guide_positives=seen,
            guide_ceilings=None
            if guide is None or seen is None
            else guide_ceilings((guide.queries * seen).sum(dim=1), config.guide_margin, config.guide_margin_kind),
        )
        with_queries = any(side in QUERY_CANDIDATES for side in config.directions)
        own = Candidates(
            first_query=sum(counts[0][:rank]),
            first_document=sum(counts[1][:rank]),
            documents=documents,
            queries=queries if with_queries else None,
            guide_documents=None if guide is None else guide.documents,
            guide_queries=None if guide is None or not with_queries else guide.queries,
        )
        way = choose_implementation(config, counts, queries)
        if way is Implementation.ring:
            return around_ring(rows, own, rules, scale, config.margin, self.parts, counts)
        everyone = Candidates(
            first_query=0,
            first_document=0,
            documents=gather_rows(documents, counts[1]),
            queries=gather_rows(queries, counts[0]) if with_queries else None,
            guide_documents=None if guide is None else gather_rows(guide.documents, counts[1]),
            guide_queries=None if own.guide_queries is None else gather_rows(own.guide_queries, counts[0]),
        )
        compute = plain if way is Implementation.plain else tiled
        return compute(rows, everyone, rules, scale, config.margin, self.parts)


def choose_implementation(config: InfoNCEConfig, counts: tuple[list[int], list[int]], like: Tensor) -> Implementation:
    """How a batch of this size is computed where the recipe leaves it open; the same on every rank.

    Args:
        config: the loss's options.
        counts: queries and documents of each rank.
        like: vectors [..., D] of the type that is computed in.
    """
    if config.implementation is not Implementation.auto:
        return config.implementation
    num_queries, num_documents = sum(counts[0]), sum(counts[1])
    candidates = [num_queries if side in QUERY_CANDIDATES else num_documents for side in config.directions]
    if max(counts[0]) * sum(candidates) * like.element_size() <= PLAIN_BYTES:
        return Implementation.plain
    different = {side in QUERY_CANDIDATES: number for side, number in zip(config.directions, candidates, strict=True)}
    others = sum(different.values()) * (1.0 - 1.0 / len(counts[0]))
    gathered = 2 * others * like.shape[-1] * like.element_size()
    return Implementation.ring if gathered > GATHERED_BYTES else Implementation.tiled


def _normalised(guide: Guide) -> Guide:
    return Guide(F.normalize(guide.queries, dim=1), F.normalize(guide.documents, dim=1))
