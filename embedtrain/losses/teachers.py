"""The vectors of a loss's teachers: of one, or of several as one vector of the concatenated dimensions.

B, M: queries and documents of this rank; T: dimensions of the teacher, or of all teachers together.
"""

import math
from collections.abc import Mapping

import torch

from embedtrain.config.loss_choices import Similarity
from embedtrain.config.similarity_losses import TeacherConfig
from embedtrain.losses.types import FROM_ROWS, BatchInfo, Guide


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
