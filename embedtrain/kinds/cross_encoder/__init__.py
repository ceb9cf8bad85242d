"""model.kind=cross_encoder: a score per pair of query and document (a reranker)."""

from typing import TYPE_CHECKING

from embedtrain.config.kinds import Kind

if TYPE_CHECKING:
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.models.types import ModelSource


class CrossEncoder(Kind):
    """A score per pair of query and document (a reranker)."""

    name = "cross_encoder"
    summary = "a score per pair of query and document (a reranker)"
    aliases = ("reranker", "ranker", "reranking", "crossencoder", "cross")

    def score(self, source: "ModelSource") -> "Score":
        """The score itself, which the model computes of a pair."""
        from embedtrain.losses.score import PairScore

        return PairScore()

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/cross_encoder/files.py`."""
        from embedtrain.kinds.cross_encoder.files import CrossEncoderFiles

        return CrossEncoderFiles()
