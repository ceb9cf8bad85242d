"""model.kind=dense: a vector per text."""

from typing import TYPE_CHECKING

from embedtrain.config.kinds import Kind

if TYPE_CHECKING:
    from embedtrain.losses.score import Score
    from embedtrain.models.types import ModelSource


class Dense(Kind):
    """A vector per text."""

    name = "dense"
    summary = "a vector per text"
    aliases = ("biencoder", "embedder", "embedding", "sentencetransformer")

    def score(self, source: "ModelSource") -> "Score":
        """The similarity of two vectors."""
        from embedtrain.inference.vectors import vector_score

        return vector_score(source.similarity)
