"""model.kind=dense: a vector per text."""

from typing import TYPE_CHECKING

from embedtrain.config.kinds import Kind

if TYPE_CHECKING:
    from embedtrain.formats.model_files import ModelFiles
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

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/dense/files.py`."""
        from embedtrain.kinds.dense.files import DenseFiles

        return DenseFiles()
