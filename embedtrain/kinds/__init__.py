"""The kinds of models, one package each; lower packages reach them by `config.kinds`."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from embedtrain.config.kinds import Kind

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from embedtrain.models.encoder import Encoder, Head
    from embedtrain.models.types import ModelSource


class BackboneKind(Kind):
    """A kind whose model is a backbone without a head of transformers, to which it adds `head`."""

    def model_class(self, config: "PretrainedConfig") -> Any:
        """The class without a head."""
        from transformers import AutoModel

        return AutoModel

    @abstractmethod
    def head(self, source: "ModelSource") -> "Head":
        """The head, with new weights."""

    def encoder(self, source: "ModelSource", model: "PreTrainedModel") -> "Encoder":
        """The model with the head."""
        from embedtrain.models.encoder import Encoder, prepare_backbone

        return Encoder(prepare_backbone(model), self.head(source))

    def read_weights(self, source: "ModelSource") -> tuple[dict[str, "Tensor"], set[str]]:
        """Those of the backbone, and those of the head that it has besides dense modules."""
        from embedtrain.models.build import read_backbone

        weights, missing = read_backbone(source)
        return weights | self.head_weights(source), missing
