"""model.kind=late_interaction: a vector per token of a text (ColBERT)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from embedtrain.config.kinds import Kind

if TYPE_CHECKING:
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.models.types import ModelSource


class LateInteraction(Kind):
    """A vector per token of a text (ColBERT)."""

    name = "late_interaction"
    summary = "a vector per token of a text (ColBERT)"
    aliases = ("colbert", "multivector", "multivectorencoder")
    own_losses: ClassVar[Mapping[str, str]] = {"xtr": "embedtrain.kinds.late_interaction.xtr:XTR"}

    def score(self, source: "ModelSource") -> "Score":
        """MaxSim, or its mean over the tokens of the query."""
        from embedtrain.config.late_interaction import TokenSimilarity
        from embedtrain.kinds.late_interaction.score import MaxSim

        assert source.kind.name == "late_interaction"
        return MaxSim(mean=source.settings.similarity is TokenSimilarity.meanmaxsim)

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/late_interaction/files.py`."""
        from embedtrain.kinds.late_interaction.files import LateInteractionFiles

        return LateInteractionFiles()
