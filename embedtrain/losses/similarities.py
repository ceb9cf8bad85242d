"""Distillation of the similarities within a batch: DistillSimilarities and SimilarityMSE.

B, M: queries and documents of this rank; N, K: of all ranks; D, T: dimensions of the student and of the teacher.
"""

from collections.abc import Hashable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.loss_choices import Implementation, LossDirection, Similarity
from embedtrain.config.similarity_losses import CandidateSet, DistillSimilaritiesConfig, Divergence, SimilarityMSEConfig
from embedtrain.distributed.collectives import gather_rows, sum_over_ranks
from embedtrain.losses.divergence import (
    TILE_CELLS,
    Comparison,
    DivergenceSums,
    Texts,
    ring_divergence,
    tiled_divergence,
)
from embedtrain.losses.excluded import QUERY_ANCHORS, QUERY_CANDIDATES, ExcludedCandidates, Exclusion
from embedtrain.losses.infonce import choose_implementation
from embedtrain.losses.similarity import at_least_float32, group_logsumexp, group_max, sum_by_row
from embedtrain.losses.teachers import teacher_dimension, teacher_vectors
from embedtrain.losses.types import BatchInfo, GlobalRows, Guide, Loss, LossOutput, Prepared


class DistillSimilarities(Loss):
    """The teacher's softmax over the documents of the global batch is the target of the student's.

    For query i, p_i is the softmax over the documents of all ranks of the teacher's cosines divided by
    `teacher_temperature`, q_i that of the student's similarities divided by `temperature`; the loss is the mean over
    all queries of their divergence, by default KL(p_i || q_i) (`divergence` has the formulas). A candidate that is left
    out is left out of both. With `candidates=row` the softmaxes are over a row's own documents, and the mean is over
    rows with at least two. Logs `agreement`, the fraction of rows whose best candidate is also the teacher's.
    """

    def __init__(self, config: DistillSimilaritiesConfig, guide_dimensions: Mapping[str, int]) -> None:
        super().__init__()
        self.config = config
        self.teacher_dimension = teacher_dimension(config, guide_dimensions)

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """The excluded candidates."""
        exclusion = self._exclusion(batch_info.rows, dimension, torch.float32)
        if exclusion in batch_info.prepared:
            return {}
        return {exclusion: ExcludedCandidates.build(exclusion, batch_info.rows)}

    def _exclusion(self, rows: GlobalRows, dimension: int, dtype: torch.dtype) -> Exclusion:
        if self.config.candidates is CandidateSet.row:
            return Exclusion(directions=(), duplicates=self.config.mask_duplicates)
        return Exclusion(
            directions=tuple(self.config.directions),
            duplicates=self.config.mask_duplicates,
            score_positive_twice=True,  # a row's own pair is a candidate
            ring=self._implementation(rows, dimension, dtype) is Implementation.ring,
        )

    def _implementation(self, rows: GlobalRows, dimension: int, dtype: torch.dtype) -> Implementation:
        # The teacher's vectors are gathered without a gradient.
        gathered = dimension + (self.teacher_dimension or dimension) // 2
        return choose_implementation(self.config, rows.counts, gathered, dtype)

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with the teacher's [B, T] and [M, T] to this rank's loss."""
        student = Guide(at_least_float32(queries), at_least_float32(documents))
        if self.config.similarity is not Similarity.dot:
            student = student.comparable()
        guide = teacher_vectors(self.config, batch_info)
        teacher = guide.map_tensors(lambda vectors: vectors.to(student.queries)).comparable()
        compute = self._within_rows if self.config.candidates is CandidateSet.row else self._within_batch
        with torch.autocast(queries.device.type, enabled=False):
            return compute(student, teacher, batch_info)

    def _within_batch(self, student: Guide, teacher: Guide, batch_info: BatchInfo) -> LossOutput:
        rows, (temperature, teacher_temperature) = batch_info.rows, self.config.temperatures
        dimension, dtype = student.documents.shape[1], student.documents.dtype
        implementation = self._implementation(rows, dimension, dtype)
        excluded = ExcludedCandidates.of(self._exclusion(rows, dimension, dtype), batch_info)
        sums = []
        for direction in self.config.directions:
            of_queries = direction in QUERY_CANDIDATES
            counts = rows.counts.queries if of_queries else rows.counts.documents
            first = (rows.local_rows if of_queries else rows.local_documents).start
            candidates = [model.queries if of_queries else model.documents for model in (student, teacher)]
            anchors = [
                model.queries if direction in QUERY_ANCHORS else model.documents[batch_info.positives]
                for model in (student, teacher)
            ]
            texts = Texts(rows.local_rows.start, anchors[0] / temperature, anchors[1] / teacher_temperature)
            comparison = Comparison(self.config.divergence, direction, excluded)
            if implementation is Implementation.ring:
                sums.append(
                    ring_divergence(texts, Texts(first, *candidates), comparison, (rows.counts.queries, counts))
                )
                continue
            gathered = Texts(0, *(gather_rows(vectors, counts) for vectors in candidates))
            plain = implementation is Implementation.plain
            tile_cells = max(1, len(texts) * len(gathered)) if plain else TILE_CELLS
            sums.append(tiled_divergence(texts, gathered, comparison, tile_cells))
        return _mean(sums, max(1, sum(rows.counts.queries)))

    def _within_rows(self, student: Guide, teacher: Guide, batch_info: BatchInfo) -> LossOutput:
        """Each query against its own documents, in groups of any size; other ranks send only ids of texts."""
        owners, num_rows = batch_info.owners, batch_info.num_queries
        mask = torch.zeros(len(owners), dtype=torch.bool, device=owners.device)
        exclusion = self._exclusion(batch_info.rows, student.documents.shape[1], student.documents.dtype)
        excluded = ExcludedCandidates.of(exclusion, batch_info)
        excluded.exclude_answers(mask, owners)
        mask.index_fill_(0, batch_info.positives, value=False)
        scores = [
            (model.queries[owners] * model.documents).sum(dim=1) / temperature
            for model, temperature in zip((student, teacher), self.config.temperatures, strict=True)
        ]
        masked = [values.masked_fill(mask, -torch.inf) for values in scores]
        best = [values.detach() == group_max(values.detach(), owners, num_rows)[owners] for values in masked]
        if self.config.divergence is Divergence.mse:
            count = torch.zeros_like(student.queries[:, 0]).index_add(0, owners, (~mask).to(scores[0].dtype))
            terms = (scores[0] - scores[1]).masked_fill(mask, 0.0).square() / count.clamp(min=1)[owners]
        else:
            log_q, log_p = (
                (values - group_logsumexp(values, owners, num_rows)[owners]).masked_fill(mask, 0.0) for values in masked
            )
            comparison = Comparison(self.config.divergence, LossDirection.query_document, excluded)
            terms = comparison.terms(log_p, log_q)[0].masked_fill(mask, 0.0)
        # The divergence of a single document is 0, whatever the vectors are.
        needed = 0 if self.config.divergence is Divergence.mse else 1
        total = max(1, int(np.count_nonzero(batch_info.rows.num_documents > needed)))
        several = torch.bincount(owners, minlength=num_rows) > needed
        both = group_max((best[0] & best[1]).to(terms.dtype), owners, num_rows).clamp(min=0.0)
        metrics = {"agreement": (both * several).sum() / total}
        return LossOutput(terms.sum() / total, metrics, sum_by_row(terms, owners, num_rows) / total)


class SimilarityMSE(Loss):
    """The mean over all pairs of texts of the global batch of the squared difference of their cosines (Jasper, 2024).

    With the normalised vectors of all n texts, queries and documents, X [n, D] of the student and A [n, T] of the
    teacher, |XX' - AA'|^2 = |X'X|^2 - 2 |X'A|^2 + |A'A|^2: matrices of D x D, D x T and T x T that are summed over the
    ranks, instead of the n x n cosines. The diagonal of the difference is 0. The terms are of the size of n^2 and their
    sum is not, so it is computed in float64.
    """

    def __init__(self, config: SimilarityMSEConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with the teacher's [B, T] and [M, T] to this rank's loss."""
        guide = teacher_vectors(self.config, batch_info)
        with torch.autocast(queries.device.type, enabled=False):
            student = F.normalize(torch.cat([queries, documents]).double(), dim=1)
            teacher = F.normalize(torch.cat([guide.queries, guide.documents]).double(), dim=1)
            own, cross = sum_over_ranks(student.T @ student), sum_over_ranks(student.T @ teacher)
            target = sum_over_ranks(teacher.T @ teacher)
            squares = own.square().sum() - 2 * cross.square().sum() + target.square().sum()
        counts = batch_info.rows.counts
        num_texts = sum(counts.queries) + sum(counts.documents)
        loss = squares / max(1, num_texts * (num_texts - 1)) / len(counts.queries)
        return LossOutput(loss.to(at_least_float32(queries[:0]).dtype))


def _mean(sums: list[DivergenceSums], num_rows: int) -> LossOutput:
    """The mean of the directions, divided by the number of rows of all ranks."""
    total = num_rows * len(sums)
    loss, row_losses, num_agreeing = (
        torch.stack([getattr(part, name) for part in sums]).sum(dim=0)
        for name in ("loss", "row_losses", "num_agreeing")
    )
    return LossOutput(loss / total, {"agreement": num_agreeing / total}, row_losses / total)
