"""Distillation from a teacher: from its scores (DistillScores, MarginMSE) or from its vectors (DistillEmbeddings).

B, M: queries and documents of this rank; D: dimensions of the model; T: of the teacher.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedtrain.config.losses import (
    DistillEmbeddingsConfig,
    DistillScoresConfig,
    EmbeddingDistance,
    MarginMSEConfig,
    Similarity,
    TeacherConfig,
    TeacherMap,
)
from embedtrain.config.validation import written
from embedtrain.errors import ConfigError
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.listwise import score_range
from embedtrain.losses.score import Score, VectorScore
from embedtrain.losses.similarity import (
    at_least_float32,
    group_log_softmax,
    group_max,
    is_group_max,
    positions_in_row,
    sum_by_row,
)
from embedtrain.losses.types import FROM_ROWS, BatchInfo, EncodedLoss, Guide, Loss, LossOutput


class DistillScores(EncodedLoss):
    """Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); for rankings Lin et al. (2021).

    KL(teacher || student) of the two softmaxes over a row's own documents, optionally times temperature^2; the
    mean over all rows with at least two documents. `normalize_scores` maps a row's scores of the student linearly to 0
    to 1, with gradients through their minimum and maximum (Chaffin and Sourty, 2025, "PyLate"). Logs `agreement`, the
    fraction of rows whose best document is also the teacher's, and `score_range`.
    """

    def __init__(self, config: DistillScoresConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)
        default = 1.0 if config.normalize_scores else self.score.default_temperature
        self.temperature = default if config.temperature is None else config.temperature
        self.normalize_scores = config.normalize_scores
        self.teacher_temperature = config.teacher_temperature
        self.factor = self.temperature**2 if config.times_squared_temperature else 1.0

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents with scores [M] to this rank's loss."""
        student, teacher = self.score.pairs(queries, documents, batch_info), _teacher_scores(batch_info)
        teacher, owners, num_queries = teacher.to(student.dtype), batch_info.owners, batch_info.num_queries
        num_rows = max(1, int((batch_info.rows.num_documents > 1).sum()))

        logits = _normalized(student, owners, num_queries) if self.normalize_scores else student
        log_student = group_log_softmax(logits / self.temperature, owners, num_queries)
        target = group_log_softmax(teacher / self.teacher_temperature, owners, num_queries).exp()
        divergence = torch.xlogy(target, target) - target * log_student
        loss = divergence.sum() * self.factor / num_rows

        best = is_group_max(student.detach(), owners, num_queries) & is_group_max(teacher, owners, num_queries)
        several = torch.searchsorted(owners, owners, right=True) - torch.searchsorted(owners, owners) > 1
        agreed = group_max((best & several).to(loss.dtype), owners, num_queries).clamp(min=0.0)
        by_row = sum_by_row(divergence, owners, num_queries) * self.factor / num_rows
        metrics = {"agreement": agreed.sum() / num_rows, **score_range(student, batch_info)}
        return LossOutput(loss, metrics, by_row)


class MarginMSE(EncodedLoss):
    """Hofstätter et al., "Improving Efficient Neural Ranking Models with Cross-Architecture ..." (2020).

    The mean over all pairs of a row's positive p and a hard negative n of the squared difference between the
    student's margin s(p) - s(n) and the teacher's. Logs `agreement`, the fraction of pairs that the
    student orders as the teacher does, and `score_range`.
    """

    def __init__(self, config: MarginMSEConfig, score: Score | None = None) -> None:
        super().__init__()
        self.score = score or VectorScore(config.similarity)

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """B queries and M documents with scores [M] to this rank's loss."""
        student = self.score.pairs(queries, documents, batch_info)
        teacher = _teacher_scores(batch_info).to(student.dtype)
        positions, negatives = positions_in_row(batch_info.owners), batch_info.negatives
        positives = negatives - positions[negatives]
        margins, targets = student[positives] - student[negatives], teacher[positives] - teacher[negatives]
        num_pairs = max(1, batch_info.rows.num_negatives)
        agreed = (margins.detach().sign() == targets.sign()).sum() / num_pairs
        terms = (margins - targets).square()
        by_row = sum_by_row(terms, batch_info.owners[negatives], batch_info.num_queries) / num_pairs
        metrics = {"agreement": agreed, **score_range(student, batch_info)}
        return LossOutput(terms.sum() / num_pairs, metrics, by_row)


class DistillEmbeddings(Loss):
    """Kim et al., "EmbedDistill: A Geometric Knowledge Distillation for Information Retrieval" (2023).

    The mean over all texts, queries and documents, of the distance from the teacher's vector: 1 - cosine, the
    mean over dimensions of the squared difference (mse), or the length of the difference (l2). Unless D equals T, a
    projection D -> T has to be trained (`project`), or the teacher's vectors are mapped T -> D (`teacher_map`), to
    their first dimensions, by a fixed random matrix with orthonormal columns, or to their principal components, which
    `set_principal_components` sets. `guide_dimensions` has T by the paths
    of `config` or FROM_ROWS, optional without a projection.
    """

    def __init__(self, config: DistillEmbeddingsConfig, dimension: int, guide_dimensions: Mapping[str, int]) -> None:
        super().__init__()
        self.config, self.distance, self.dimension = config, config.distance, dimension
        self.projection: nn.Linear | None = None
        self.teacher_projection: Tensor | None
        self.register_buffer("teacher_projection", None)
        width = teacher_dimension(config, guide_dimensions)
        if config.project:
            if width is None:
                raise ConfigError("loss.project=true: the dimension of the teacher's vectors is unknown")
            self.projection = nn.Linear(dimension, width)
        elif config.teacher_map is not None:
            if width is None or width < dimension:
                raise ConfigError(
                    f"loss.teacher_map={config.teacher_map.value}: the teacher's vectors have {width or 'unknown'} "
                    f"dimensions, fewer than the {dimension} of the model's; write loss.project=true instead"
                )
            if config.teacher_map is not TeacherMap.truncate:
                # The same as for `orthogonal`, until the training sets the principal components.
                random = torch.randn(width, dimension, dtype=torch.float64)
                matrix = torch.linalg.qr(random)[0].float()
                self.register_buffer("teacher_projection", matrix, persistent=False)
        elif width is not None:
            self._check_widths(dimension, width)

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] with the teacher's [B, T] and [M, T] to this rank's loss."""
        guide = teacher_vectors(self.config, batch_info)
        student = torch.cat([at_least_float32(queries), at_least_float32(documents)])
        teacher = torch.cat([guide.queries, guide.documents]).to(student.dtype)
        if self.projection is not None:
            with torch.autocast(student.device.type, enabled=False):
                student = self.projection(student)
        else:
            if self.teacher_projection is not None:
                with torch.autocast(student.device.type, enabled=False):
                    teacher = teacher @ self.teacher_projection.to(student.dtype)
            elif self.config.teacher_map is TeacherMap.truncate:
                teacher = teacher[:, : self.dimension]
            self._check_widths(self.dimension, teacher.shape[1])
            if student.shape[1] < teacher.shape[1]:  # within Matryoshka, which normalises truncated vectors
                teacher = F.normalize(teacher[:, : student.shape[1]], dim=1)
        match self.distance:
            case EmbeddingDistance.cosine:
                terms = 1 - F.cosine_similarity(student, teacher, dim=1)
            case EmbeddingDistance.mse:
                terms = (student - teacher).square().mean(dim=1)
            case EmbeddingDistance.l2:
                terms = torch.linalg.vector_norm(student - teacher, dim=1)
        num_texts = max(1, sum(map(sum, batch_info.rows.counts)))
        owners = torch.cat([torch.arange(len(queries), device=terms.device), batch_info.owners])
        return LossOutput(terms.sum() / num_texts, row_losses=sum_by_row(terms, owners, len(queries)) / num_texts)

    def set_principal_components(self, components: Tensor) -> None:
        """Map the teacher's vectors to the first D components [T, T], of which each is a row."""
        assert self.teacher_projection is not None
        self.teacher_projection.copy_(components[: self.dimension].T)

    def _check_widths(self, dimension: int, width: int) -> None:
        if dimension != width:
            paths = self.config.teacher_paths
            teacher = f"loss.teachers={written(paths)} have"
            if len(paths) < 2:
                teacher = f"loss.teacher={paths[0]} has" if paths else "the rows' vectors have"
            raise ConfigError(
                f"{teacher} {width} dimensions and the model's vectors have "
                f"{dimension}: write loss.project=true to train a projection between them, or loss.teacher_map"
            )


def _teacher_scores(batch_info: BatchInfo) -> Tensor:
    """The teacher's score of each document, [M]."""
    assert batch_info.scores is not None, "the data layer gives every document a score, see RowRequirements"
    return batch_info.scores


def _normalized(scores: Tensor, owners: Tensor, num_rows: int) -> Tensor:
    """Scores [M] less the smallest of each row, divided by the range of the row; equal scores give 0."""
    lowest, highest = -group_max(-scores, owners, num_rows), group_max(scores, owners, num_rows)
    span = (highest - lowest)[owners]
    return (scores - lowest[owners]) / span.masked_fill(span == 0, 1.0)


def teacher_dimension(config: TeacherConfig, guide_dimensions: Mapping[str, int]) -> int | None:
    """T; None if the dimension of a teacher is unknown, as of vectors in the rows."""
    widths = [guide_dimensions.get(path) for path in config.teacher_paths or [FROM_ROWS]]
    known = [width for width in widths if width is not None]
    return sum(known) if len(known) == len(widths) else None


def teacher_vectors(config: TeacherConfig, batch_info: BatchInfo) -> Guide:
    """Queries [B, T] and documents [M, T].

    The vectors of several teachers are normalised, unless a teacher compares by inner product, multiplied by the square
    root of their weights, which sum to 1, and concatenated (Zhang et al., 2024, "Jasper and Stella"): the similarity of
    two texts is the weighted mean of the teachers' similarities.
    """
    guides = [batch_info.guides[path] for path in config.teacher_paths or [FROM_ROWS]]
    if len(guides) == 1:
        return guides[0]
    weights = config.teacher_weights or [1.0] * len(guides)
    factors = [math.sqrt(weight / sum(weights)) for weight in weights]
    comparable = [guide.comparable() for guide in guides]
    of_queries, of_documents = (
        torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)], dim=1)
        for parts in ([guide.queries for guide in comparable], [guide.documents for guide in comparable])
    )
    has_dot = any(guide.similarity is Similarity.dot for guide in guides)
    return Guide(of_queries, of_documents, Similarity.dot if has_dot else Similarity.cosine)
