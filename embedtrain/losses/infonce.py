"""InfoNCE over the in-batch and hard negatives of all ranks, with the exact gradient of the global batch.

B, M: queries and documents of this rank; N, K: of all ranks; D: dimensions.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import (
    DistillSimilaritiesConfig,
    Hardness,
    Implementation,
    InfoNCEConfig,
    MarginKind,
    PartitionMode,
)
from embedtrain.config.validation import written
from embedtrain.distributed.collectives import gather_rows
from embedtrain.errors import ConfigError
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.excluded import (
    QUERY_ANCHORS,
    QUERY_CANDIDATES,
    ExcludedCandidates,
    ExcludingLoss,
    Exclusion,
)
from embedtrain.losses.mixing import Draws, OwnDocuments, mixed_losses
from embedtrain.losses.ring import MAX_GATHERED_BYTES, gather_part, gathered_bytes
from embedtrain.losses.score import TiledScore, VectorScore
from embedtrain.losses.similarity import Temperature, group_logsumexp, group_max, rounding_tolerance
from embedtrain.losses.softmax import (
    Candidates,
    Rows,
    ScoringRules,
    SoftmaxSums,
    focal_weights,
    plain_softmax,
    ring_softmax,
    tiled_softmax,
)
from embedtrain.losses.types import (
    BatchInfo,
    Counts,
    EncodedLoss,
    GlobalRows,
    Guide,
    LossOutput,
    Sizes,
    rows_per_rank,
)

# Up to so many bytes of scores the plain implementation is as fast as the others, and the simplest.
MAX_PLAIN_BYTES = 1 << 26

_ONE_ROW_EACH = Sizes()


class InfoNCE(ExcludingLoss, EncodedLoss):
    """van den Oord et al., "Representation Learning with Contrastive Predictive Coding" (2018).

    The loss of query i is -log softmax, at its positive, of the scores s(q_i, d_j) / temperature over the documents of
    all ranks, where s is the inner product of vectors or another `TiledScore`; `softmax` has the formula. Options score
    further directions (Li et al., 2023, "GTE"), exclude candidates (Solatorio, 2024, "GISTEmbed"; Zhang et al., 2025,
    "Qwen3 Embedding") or weight them (Lan et al., 2025, "LLaVE") or rows (`focal`). Any number of hard negatives
    per query, any number of rows per rank; each rank scores only its own rows, so its work grows with B x K. A row
    without negatives has loss 0. Logs `accuracy`, the fraction of rows whose positive scores higher than every negative
    document, and a trained `temperature`.
    """

    def __init__(self, config: InfoNCEConfig, score: TiledScore | None = None) -> None:
        super().__init__()
        self.config = config
        self.score = score or VectorScore(config.similarity)
        bounds = config.temperature_bounds or self.score.temperature_bounds
        value = self.score.default_temperature if config.temperature is None else config.temperature
        if config.learn_temperature and not bounds[0] <= value <= bounds[1]:
            raise ConfigError(f"loss.temperature={value:g}: must be within temperature_bounds={written(list(bounds))}")
        self.temperature = Temperature(value, trained=config.learn_temperature, bounds=bounds)
        joint = config.partition_mode is PartitionMode.joint
        self.partitions = [config.directions] if joint else [[direction] for direction in config.directions]
        # A function of the seed that the caller has set, as the initial values of a loss's parameters are.
        self.mixing_seed = int(torch.randint(2**62, ())) if config.mixes_negatives else 0

    def exclusion(self, rows: GlobalRows, width: int, dtype: torch.dtype) -> Exclusion:
        """See `ExcludingLoss`."""
        config = self.config
        if not config.in_batch_negatives:
            return Exclusion(directions=(), duplicates=config.mask_duplicates)
        return Exclusion(
            directions=tuple(config.directions),
            duplicates=config.mask_duplicates,
            score_positive_twice=config.partition_mode is PartitionMode.joint,
            hardness=config.hardness is not Hardness.none,
            own_answers=config.mixes_negatives,
            ring=choose_implementation(config, rows.counts, width, dtype, rows.part_sizes) is Implementation.ring,
        )

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        # Autocast would round the products to bf16: logits of 50 would be off by a quarter.
        with torch.autocast(queries.parts[0].values.device.type, enabled=False):
            return self._forward(self.score.prepare(queries), self.score.prepare(documents), batch_info)

    def _forward(self, queries: Part, documents: Part, batch_info: BatchInfo) -> LossOutput:
        scale = self.temperature.scale(queries.values)
        guide = None if self.config.guide is None else batch_info.guides[self.config.guide].comparable()
        compute = self._in_batch_negatives if self.config.in_batch_negatives else self._hard_negatives
        sums = compute(queries, documents, batch_info, guide, scale)
        counts = batch_info.rows.counts
        num_rows = max(1, sum(counts.queries))
        metrics = {"accuracy": sums.num_correct / num_rows}
        if self.temperature.log_scale is not None:
            metrics["temperature"] = 1.0 / (scale.detach().squeeze() * len(counts.queries))
        return LossOutput(sums.loss / num_rows, metrics, sums.row_losses / num_rows)

    def _in_batch_negatives(
        self,
        queries: Part,
        documents: Part,
        batch_info: BatchInfo,
        guide: Guide | None,
        scale: Tensor,
    ) -> SoftmaxSums:
        """Each query against the documents of all ranks, and what else `directions` name."""
        config, global_rows = self.config, batch_info.rows
        counts, sizes = global_rows.counts, global_rows.part_sizes
        first_query, first_document = global_rows.local_rows.start, global_rows.local_documents.start
        dimension, dtype = queries.values.shape[1], queries.values.dtype
        rules = ScoringRules(
            score=self.score,
            excluded=ExcludedCandidates.of(self.exclusion(global_rows, dimension, dtype), batch_info),
            hardness=config.hardness,
            hardness_strength=config.hardness_strength,
            focal=config.focal,
        )
        positives = documents.take(batch_info.positives, global_rows.local_positives)
        one_each = torch.arange(len(queries), device=scale.device), np.ones(len(queries), dtype=np.int64)
        similarity = self.score.compare(queries, positives, *one_each)
        with torch.no_grad():
            tolerance = self.score.rounding(queries, positives)
            thresholds, limits = score_limits(similarity.detach(), tolerance, scale.detach(), config)
        guide_positives = guide_limit = None
        if guide is not None:
            guide_positives = guide.documents[batch_info.positives]
            guide_limit = guide_limits((guide.queries * guide_positives).sum(dim=1), config)
        positive = (similarity - config.margin) * scale
        mixed: Tensor | None = None
        if config.mixes_negatives:
            own_counts = global_rows.local_num_documents
            scores = self.score.compare(queries, documents, batch_info.owners, own_counts).detach() * scale.detach()
            mask = self._excluded_documents(scores, batch_info, rules.excluded, limits, guide)
            own = OwnDocuments(queries=queries.values, documents=documents.values, scores=scores, excluded=mask)
            mixed = self._mixed_losses(own, positive, scale, limits, batch_info)
            positive = positive if mixed is None else positive + mixed
        rows = Rows(
            first=first_query,
            queries=queries,
            positives=None if all(direction in QUERY_ANCHORS for direction in config.directions) else positives,
            accuracy_thresholds=thresholds,
            score_limits=limits,
            guide_queries=None if guide is None else guide.queries,
            guide_positives=guide_positives,
            guide_limits=guide_limit,
            mixed_losses=None if mixed is None else mixed.detach(),
        )
        queried = queries if any(direction in QUERY_CANDIDATES for direction in config.directions) else None
        implementation = choose_implementation(config, counts, dimension, dtype, sizes)
        if implementation is Implementation.ring:
            local = self._candidates(documents, queried, guide, first_document, first_query)
            texts = documents, queried
            sums = ring_softmax(rows, local, rules, scale, positive, self.partitions, texts, global_rows)
            return sums.plus(mixed)
        gathered = self._candidates(
            gather_part(documents, sizes.documents, counts.documents),
            None if queried is None else gather_part(queried, sizes.queries, counts.queries),
            None if guide is None else _gather_guide(guide, counts, with_queries=queried is not None),
        )
        softmax = plain_softmax if implementation is Implementation.plain else tiled_softmax
        return softmax(rows, gathered, rules, scale, positive, self.partitions).plus(mixed)

    def _candidates(
        self,
        documents: Part,
        queries: Part | None,
        guide: Guide | None,
        first_document: int = 0,
        first_query: int = 0,
    ) -> Candidates:
        """These documents, and queries if a direction compares with them; the first has this global position."""
        return Candidates(
            first_query=first_query,
            first_document=first_document,
            documents=self.score.columns(documents),
            queries=None if queries is None else self.score.columns(queries),
            guide_documents=None if guide is None else guide.documents,
            guide_queries=None if guide is None or queries is None else guide.queries,
        )

    def _hard_negatives(
        self,
        queries: Part,
        documents: Part,
        batch_info: BatchInfo,
        guide: Guide | None,
        scale: Tensor,
    ) -> SoftmaxSums:
        """Each query against its own documents only, in groups of any size; other ranks send only ids of texts."""
        config, owners, positives = self.config, batch_info.owners, batch_info.positives
        similarity = self.score.compare(queries, documents, owners, batch_info.rows.local_num_documents)
        positive = similarity[positives]
        scores = similarity * scale
        with torch.no_grad():
            tolerance = self.score.rounding(queries, documents.take(positives, batch_info.rows.local_positives))
            thresholds, limits = score_limits(positive.detach(), tolerance, scale.detach(), config)
        exclusion = self.exclusion(batch_info.rows, queries.values.shape[1], queries.values.dtype)
        excluded = ExcludedCandidates.of(exclusion, batch_info)
        mask = self._excluded_documents(scores, batch_info, excluded, limits, guide)
        target = (positive - config.margin) * scale
        own = OwnDocuments(queries=queries.values, documents=documents.values, scores=scores.detach(), excluded=mask)
        mixed = self._mixed_losses(own, target, scale, limits, batch_info)
        if config.hardness in (Hardness.hard, Hardness.all):
            scores = scores + config.hardness_strength * similarity.detach()
        scores = scores.masked_fill(mask, -torch.inf)
        highest = group_max(scores.detach(), owners, len(queries))
        gap = group_logsumexp(scores, owners, len(queries)) - (target if mixed is None else target + mixed)
        gap = gap.masked_fill(highest == -torch.inf, -torch.inf)
        weights = focal_weights(gap, config.focal, None if mixed is None else mixed.detach())
        terms = F.softplus(gap) * weights
        return SoftmaxSums(terms.sum(), (highest < thresholds).sum(), terms.detach(), weights).plus(mixed)

    def _excluded_documents(
        self,
        scores: Tensor,
        batch_info: BatchInfo,
        excluded: ExcludedCandidates,
        limits: Tensor | None,
        guide: Guide | None,
    ) -> Tensor:
        """Bool [M]: the positives of this rank, and its documents that are no negatives of their own row."""
        owners, positives = batch_info.owners, batch_info.positives
        mask = torch.zeros(len(owners), dtype=torch.bool, device=owners.device)
        mask.index_fill_(0, positives, True)
        excluded.exclude_answers(mask, owners)
        if limits is not None:
            mask |= scores.detach() > limits[owners]
        if guide is not None:
            similarity = (guide.queries[owners] * guide.documents).sum(dim=1)
            mask |= similarity > guide_limits(similarity[positives], self.config)[owners]
        return mask

    def _mixed_losses(
        self, own: OwnDocuments, positive: Tensor, scale: Tensor, limits: Tensor | None, batch_info: BatchInfo
    ) -> Tensor | None:
        """See `mixed_losses`; None without mixed negatives."""
        if not self.config.mixes_negatives:
            return None
        draws = Draws.of(batch_info, self.config.mixed_pairs, self.mixing_seed)
        return mixed_losses(own, positive, scale, limits, self.config, draws)


def score_limits(
    similarity: Tensor, tolerance: Tensor, scale: Tensor, config: InfoNCEConfig
) -> tuple[Tensor, Tensor | None]:
    """`accuracy_thresholds` and `score_limits` of `Rows`, from the positives' scores and their rounding errors [B]."""
    margin = config.false_negative_margin
    limits = None if margin is None else (similarity + margin + tolerance) * scale
    return (similarity - config.margin - tolerance) * scale, limits


def guide_limits(positive: Tensor, config: InfoNCEConfig) -> Tensor:
    """From the guide's similarities of the positives [c]: the similarity above which it rejects a negative."""
    scale = positive.abs() if config.guide_margin_kind is MarginKind.relative else 1.0
    return positive - config.guide_margin * scale + rounding_tolerance(positive)


def choose_implementation(
    config: InfoNCEConfig | DistillSimilaritiesConfig,
    counts: Counts,
    dimension: int,
    dtype: torch.dtype,
    sizes: Sizes = _ONE_ROW_EACH,
) -> Implementation:
    """The implementation for a batch of this size unless the recipe names one; the same on every rank."""
    if config.implementation is not Implementation.auto:
        return config.implementation
    # Texts of several rows have as many scores before their maximum.
    num_rows = [rows_per_rank(part, number) for part, number in zip(sizes, counts, strict=True)]
    num_candidates = [
        sum(counts.queries) if direction in QUERY_CANDIDATES else sum(counts.documents)
        for direction in config.directions
    ]
    by_kind = {
        direction in QUERY_CANDIDATES: sum(num_rows[0] if direction in QUERY_CANDIDATES else num_rows[1])
        for direction in config.directions
    }
    size = gathered_bytes(sum(by_kind.values()), dimension, dtype, len(counts.queries))
    if size > MAX_GATHERED_BYTES:  # also where scores are few: a page has a thousand rows
        return Implementation.ring
    is_small = max(num_rows[0]) * sum(num_candidates) * dtype.itemsize <= MAX_PLAIN_BYTES
    return Implementation.plain if is_small else Implementation.tiled


def _gather_guide(guide: Guide, counts: Counts, *, with_queries: bool) -> Guide:
    """The vectors of all ranks; those of queries only if they are candidates."""
    documents = gather_rows(guide.documents, counts.documents)
    return Guide(gather_rows(guide.queries, counts.queries) if with_queries else guide.queries, documents)
