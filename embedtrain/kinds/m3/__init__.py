"""model.kind=m3: a vector, lexical weights and a vector per token (BGE-M3)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from embedtrain.config.kinds import Kind

if TYPE_CHECKING:
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.models.types import ModelSource


class M3(Kind):
    """A vector, lexical weights and a vector per token (BGE-M3)."""

    name = "m3"
    summary = "a vector, lexical weights and a vector per token (BGE-M3)"
    aliases = ("bgem3", "hybrid")
    own_losses: ClassVar[Mapping[str, str]] = {"m3": "embedtrain.kinds.m3.loss:M3Loss"}

    def score(self, source: "ModelSource") -> "Score":
        """The weighted sum of the three scores."""
        from embedtrain.kinds.m3.score import M3Score

        assert source.kind.name == "m3"
        return M3Score(source.settings)

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/m3/files.py`."""
        from embedtrain.kinds.m3.files import M3Files

        return M3Files()
