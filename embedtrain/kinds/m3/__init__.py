"""model.kind=m3: a vector, lexical weights and a vector per token (BGE-M3)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from embedtrain.config.evaluation import VectorDtype
from embedtrain.config.kind_settings import HybridWeights
from embedtrain.config.losses import SCORE_LOSSES
from embedtrain.config.recipe import ADAPTER
from embedtrain.config.validation import OptionChecks
from embedtrain.kinds import BackboneKind
from embedtrain.kinds.m3.options import M3Options, check_m3

if TYPE_CHECKING:
    from torch import Size, Tensor
    from transformers import PreTrainedTokenizerBase

    from embedtrain.config.recipe import Recipe
    from embedtrain.data.tokens import Layout
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.models.encoder import Head
    from embedtrain.models.stored_weights import TensorLocation
    from embedtrain.models.types import ModelSource


class M3(BackboneKind):
    """A vector, lexical weights and a vector per token (BGE-M3)."""

    name = "m3"
    summary = "a vector, lexical weights and a vector per token (BGE-M3)"
    aliases = ("bgem3", "hybrid")
    options = M3Options
    losses = ("m3", *SCORE_LOSSES, "custom", "combined")
    why_no_other_loss = "is not for the three scores of model.kind=m3"
    why_no_dimensions = "is for vectors of one kind, and model.kind=m3 has two"
    why_no_similarity = "has three scores of its own; leave it out"
    command_options = ("hybrid_weights",)
    backbone_options = ("pooling", "normalize", "similarity")
    own_losses: ClassVar[Mapping[str, str]] = {"m3": "embedtrain.kinds.m3.loss:M3Loss"}
    views = HybridWeights._fields

    def outputs(self, source: "ModelSource") -> str:
        """The representations and their layers."""
        layers = "new layers" if source.settings.is_new else "layers"
        return (
            f"dense, lexical and multi-vector representations, {layers} of lexical weights and of token vectors of "
            f"{source.settings.token_dimension} dimensions"
        )

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """The layers and the weights of the scores."""
        return {"representations": source.settings}

    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """Texts with a row for each token."""
        from embedtrain.kinds.m3.model import M3Layout

        return M3Layout(tokenizer)

    def check_options(self, model: M3Options) -> None:
        """Values and combinations."""
        check_m3(model)

    def check_other_options(self, recipe: "Recipe") -> None:
        """Lexical weights are not rounded; PEFT's format has no place for the layers."""
        OptionChecks(recipe.evaluation.index, "evaluation.index.").require(
            recipe.evaluation.index.dtype is VectorDtype.fp32,
            "dtype",
            "must be fp32 for model.kind=m3, whose lexical weights are not rounded",
        )
        OptionChecks(recipe.export, "export.").require(
            ADAPTER not in recipe.export.formats, "formats", "adapter is not supported with model.kind=m3; leave it out"
        )

    def recognise(self, directory: Path) -> str | None:
        """A directory of FlagEmbedding, of an export or of a run."""
        from embedtrain.formats.flag_embedding import is_m3

        return "a model of three representations" if is_m3(directory) else None

    def read(self, directory: Path, model: M3Options) -> "ModelSource":
        """The settings of its files, or of a model whose backbone it gets."""
        from embedtrain.kinds.m3.source import read

        return read(self, directory, model)

    def new(self, source: "ModelSource", model: M3Options) -> "ModelSource":
        """A model of random weights."""
        from embedtrain.kinds.m3.source import with_options

        return with_options(source, model)

    def score(self, source: "ModelSource") -> "Score":
        """The weighted sum of the three scores."""
        from embedtrain.kinds.m3.score import M3Score

        return M3Score(source.settings)

    def head(self, source: "ModelSource") -> "Head":
        """Both layers of FlagEmbedding."""
        from embedtrain.kinds.m3.model import M3Head
        from embedtrain.models.encoder import hidden_size

        return M3Head(hidden_size(source.config), source.settings)

    def head_weights(self, source: "ModelSource") -> dict[str, "Tensor"]:
        """Those of both layers, which are in files of torch."""
        from embedtrain.formats.flag_embedding import read_m3_layers
        from embedtrain.models.encoder import hidden_size

        if source.settings.is_new or source.directory is None:
            return {}
        return read_m3_layers(source.directory, hidden_size(source.config))

    def locate_head(
        self, source: "ModelSource", shapes: "Mapping[str, Size]", stored: "Mapping[str, TensorLocation]"
    ) -> tuple[dict[str, "TensorLocation"], set[str]]:
        """Both layers have no safetensors file; new ones are nowhere."""
        from embedtrain.formats.flag_embedding import LAYERS

        return {}, set() if source.settings.is_new else {name for name in shapes if name.startswith(LAYERS)}

    def vectors_per_text(self, source: "ModelSource", max_length: int) -> tuple[int, int]:
        """One of each token."""
        return max_length, max_length

    @property
    def files(self) -> "ModelFiles":
        """See `kinds/m3/files.py`."""
        from embedtrain.kinds.m3.files import M3Files

        return M3Files()
