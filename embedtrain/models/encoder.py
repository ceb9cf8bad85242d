"""The encoder: backbone, pooling, dense heads, normalisation in one module with one public forward.

All of it lies inside one module because FSDP gathers weights around that module's `__call__`: a head left
outside would meet vectors of another precision, and a loss could hold an unsharded copy.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from embedtrain.config.schema import Pooling
from embedtrain.data.types import Packing
from embedtrain.models.pooling import pool, pool_packed


class Dense(nn.Module):
    """A linear head with an activation, as sentence-transformers' Dense: [N, in] -> [N, out]."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, activation: str) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out, bias=bias)
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        activated: Tensor = ACTIVATIONS[self.activation](self.linear(vectors.to(self.linear.weight.dtype)))
        return activated


# The names are those that sentence-transformers writes into a Dense module's config.json.
ACTIVATIONS: dict[str, nn.Module] = {
    "torch.nn.modules.activation.Tanh": nn.Tanh(),
    "torch.nn.modules.activation.ReLU": nn.ReLU(),
    "torch.nn.modules.activation.GELU": nn.GELU(),
    "torch.nn.modules.linear.Identity": nn.Identity(),
}


class Encoder(nn.Module):
    """Texts' tokens to vectors.

    Args:
        backbone: a Hugging Face encoder or decoder without a head.
        pooling: how one vector is made of a text's token vectors.
        normalize: whether vectors leave with L2 norm 1.
        dense: heads between pooling and normalisation.
    """

    def __init__(
        self, backbone: PreTrainedModel, pooling: Pooling, *, normalize: bool, dense: Sequence[Dense] = ()
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.dense = nn.ModuleList(dense)
        self.pooling = pooling
        self.normalize = normalize

    @property
    def dimension(self) -> int:
        """D, how many dimensions its vectors have."""
        return self.dense[-1].linear.out_features if len(self.dense) else hidden_size(self.backbone.config)  # type: ignore[union-attr, return-value]

    def forward(
        self, ids: Tensor, mask: Tensor, pooled: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Token ids [N, L] and mask [N, L] (1 = real) to float32 vectors [N, D].

        `pooled` [N, L] (1 = counts) says which of the real tokens a vector is made of: without it all, while all
        tokens see a prompt's it leaves out. With `packing` the N texts stand one after another in one row: ids, mask
        and pooled are [1, T]; for a backbone that `packing.pack` prepared.
        """
        counts = mask if pooled is None else pooled
        if packing is None:
            return self.vectors(self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state, counts)
        # Positions count as the model counts them. A mask of four dimensions is passed on as it is, so none is made.
        hidden = self.backbone(
            input_ids=ids,
            attention_mask=ids.new_ones((1, 1, 1, 1)),
            position_ids=packing.positions + first_position(self.backbone),
            packing=packing,
        ).last_hidden_state
        return self._finished(pool_packed(hidden[0], None if pooled is None else pooled[0], packing, self.pooling))

    def vectors(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """What follows the backbone: its token vectors [N, L, H] and the mask [N, L] of those that count to [N, D]."""
        return self._finished(pool(hidden, mask, self.pooling))

    def _finished(self, vectors: Tensor) -> Tensor:
        for head in self.dense:
            vectors = head(vectors)
        vectors = vectors.float()
        return F.normalize(vectors, dim=-1) if self.normalize else vectors


def prepare_backbone(backbone: PreTrainedModel) -> PreTrainedModel:
    """Switch off, in place, what an embedding model has no use for and what would break its training.

    The pooler gets no gradient, which DDP and optimiser checkpoints both choke on; a key-value cache grows
    with every recomputed layer, and its leftovers end in IndexErrors.
    """
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        backbone.pooler = None
    for part in backbone.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PretrainedConfig):
            switch_off_unused(config)
    return backbone


def switch_off_unused(config: PretrainedConfig) -> None:
    """`use_cache` and ModernBERT's own compilation, off in this config."""
    if getattr(config, "use_cache", None):
        config.use_cache = False
    if getattr(config, "reference_compile", None) is not False and hasattr(config, "reference_compile"):
        config.reference_compile = False


def first_position(backbone: nn.Module) -> int:
    """The position of a text's first token: RoBERTa's heirs count from behind the padding's number."""
    embeddings = getattr(backbone, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1  # type: ignore[union-attr]
    return 0


def hidden_size(config: PretrainedConfig) -> int:
    """The size of a token's vector."""
    return int(config.get_text_config().hidden_size)
