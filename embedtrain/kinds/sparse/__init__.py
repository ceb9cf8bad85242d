"""model.kind=sparse: a weight per word of the vocabulary (SPLADE)."""

from typing import TYPE_CHECKING

from embedtrain.config.kinds import Kind

if TYPE_CHECKING:
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.models.types import ModelSource


class Sparse(Kind):
    """A weight per word of the vocabulary (SPLADE)."""

    name = "sparse"
    summary = "a weight per word of the vocabulary (SPLADE)"
    aliases = ("splade", "sparseencoder", "learnedsparse")

    def score(self, source: "ModelSource") -> "Score":
        """The inner product of the weights of words."""
        from embedtrain.kinds.sparse.score import WordScore

        assert source.kind.name == "sparse"
        return WordScore(is_symmetric=source.settings.queries is None)

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/sparse/files.py`."""
        from embedtrain.kinds.sparse.files import SparseFiles

        return SparseFiles()
