"""The encoder: backbone, pooling, dense heads, normalisation in one module with one public forward.

All of it lies inside one module because FSDP gathers weights around that module's `__call__`: a head left
outside would meet vectors of another precision, and a loss could hold an unsharded copy.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Packing


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool token vectors [N, L, H] with mask [N, L] (1 = real) to float32 [N, H].

    Where the first and the last real token stand is read from the mask: a fixed index would take a padding
    token's vector in half of the batches, in silence.
    """
    match pooling:
        case Pooling.cls:
            return _take(hidden, mask.argmax(dim=1)).float()
        case Pooling.last:
            places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            return _take(hidden, (mask * places).argmax(dim=1)).float()
        case Pooling.mean:
            weights = mask.unsqueeze(-1).float()
            return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def pool_packed(hidden: Tensor, counts: Tensor | None, packing: Packing, pooling: Pooling) -> Tensor:
    """Pool token vectors [T, H] of texts that stand one after another to float32 [N, H].

    Args:
        hidden: of all tokens.
        counts: int64 [T], 1 where a token counts; None: all do. What does not count stands at a text's beginning.
        packing: where the texts lie.
        pooling: as for `pool`.
    """
    starts = packing.starts.long()
    match pooling:
        case Pooling.cls:
            skipped = 0 if counts is None else starts.diff() - _sums(counts[:, None].float(), packing)[:, 0].long()
            return hidden[starts[:-1] + skipped].float()
        case Pooling.last:
            return hidden[starts[1:] - 1].float()
        case Pooling.mean:
            sums, weights = hidden.float(), starts.diff().unsqueeze(-1).float()
            if counts is not None:
                sums, weights = sums * counts.unsqueeze(-1), _sums(counts.unsqueeze(-1).float(), packing)
            means: Tensor = _sums(sums, packing) / weights
            return means


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sums(rows: Tensor, packing: Packing) -> Tensor:
    """The sum of each text's rows, [T, H] to [N, H], the same to the bit every time."""
    if rows.is_cuda:
        return torch.segment_reduce(rows, "sum", lengths=packing.starts.diff().long(), axis=0, unsafe=True)
    runs = packing.runs
    parts = rows.split([texts * length for texts, length in runs])
    return torch.cat([part.view(n, length, -1).sum(1) for part, (n, length) in zip(parts, runs, strict=True)])


def _take(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), places]


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
