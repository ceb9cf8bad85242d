"""The encoder: backbone, pooling, dense heads and normalisation in one module with one public forward.

One module, because FSDP gathers weights around that module's `__call__`: a head outside of it would receive vectors of
another precision, and a loss could hold an unsharded copy.

N: texts; L: tokens of a padded text; T: tokens of all texts; H: hidden size; D: dimensions of the vectors.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk, Packing
from embedtrain.models.attention_mask import known_padding
from embedtrain.models.early_exits import EarlyExits

_LOWEST = -1e9  # of tokens that are not pooled, in a maximum; as in sentence-transformers


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool token vectors [N, L, H] with mask [N, L] (1 = real) to float32 [N, H].

    The mask gives the index of the first and the last real token: a fixed index would silently pool padding in half of
    the batches.
    """
    match pooling:
        case Pooling.cls:
            return _take(hidden, mask.argmax(dim=1)).float()
        case Pooling.last:
            positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            return _take(hidden, (mask * positions).argmax(dim=1)).float()
        case Pooling.max:
            return hidden.float().masked_fill(mask.unsqueeze(-1) == 0, _LOWEST).amax(dim=1)
        case Pooling.mean | Pooling.weighted_mean:
            counted = mask if pooling is Pooling.mean else mask * mask.cumsum(dim=1)
            weights = counted.unsqueeze(-1).float()
            return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def pool_packed(hidden: Tensor, mask: Tensor | None, packing: Packing, pooling: Pooling) -> Tensor:
    """Pool token vectors [T, H] of concatenated texts to float32 [N, H].

    `mask` int64 [T] is 0 for the tokens at the beginning of a text that are left out; None: all tokens are pooled.
    """
    starts = packing.starts.long()
    match pooling:
        case Pooling.cls:
            skipped = 0 if mask is None else starts.diff() - _sums(mask[:, None].float(), packing)[:, 0].long()
            return hidden[starts[:-1] + skipped].float()
        case Pooling.last:
            return hidden[starts[1:] - 1].float()
        case Pooling.mean:
            sums, weights = hidden.float(), starts.diff().unsqueeze(-1).float()
            if mask is not None:
                sums = sums * mask.unsqueeze(-1)
                weights = _sums(mask.unsqueeze(-1).float(), packing).clamp(min=1.0)
            means: Tensor = _sums(sums, packing) / weights
            return means
        case Pooling.weighted_mean:
            counts = packing.positions[0] + 1
            if mask is not None:
                before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
                counts = mask * (before[1:] - before[starts[:-1]].repeat_interleave(starts.diff()))
            weights = counts.unsqueeze(-1).float()
            weighted: Tensor = _sums(hidden.float() * weights, packing) / _sums(weights, packing).clamp(min=1.0)
            return weighted
        case Pooling.max:
            rows = hidden.float()
            maxima: Tensor = _maxima(rows if mask is None else rows.masked_fill(mask[:, None] == 0, _LOWEST), packing)
            return maxima


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sums(rows: Tensor, packing: Packing) -> Tensor:
    """The sum of each text's rows, [T, H] to [N, H], deterministic."""
    if rows.is_cuda:
        return torch.segment_reduce(rows, "sum", lengths=packing.starts.diff().long(), axis=0, unsafe=True)
    return torch.cat([text.sum(1) for text in _by_length(rows, packing)])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _maxima(rows: Tensor, packing: Packing) -> Tensor:
    """The maximum of each text's rows, [T, H] to [N, H]."""
    if rows.is_cuda:
        return torch.segment_reduce(rows, "max", lengths=packing.starts.diff().long(), axis=0, unsafe=True)
    return torch.cat([text.amax(1) for text in _by_length(rows, packing)])


def _by_length(rows: Tensor, packing: Packing) -> list[Tensor]:
    """The rows [T, H] of consecutive texts of one length L, [n, L, H]."""
    runs = packing.runs
    parts = rows.split([texts * length for texts, length in runs])
    return [part.view(n, length, -1) for part, (n, length) in zip(parts, runs, strict=True)]


def _take(hidden: Tensor, indices: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), indices]


class Dense(nn.Module):
    """A linear head with an activation, as sentence-transformers' Dense: [N, in] -> [N, out]."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, activation: str, is_new: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out, bias=bias)
        self.activation = activation
        self.is_new = is_new  # whether it is in no files, so that it is trained beside adapters

    def forward(self, vectors: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        activated: Tensor = ACTIVATIONS[self.activation](self.linear(vectors.to(self.linear.weight.dtype)))
        return activated


# The names are those that sentence-transformers writes into a Dense module's config.json.
ACTIVATIONS: dict[str, nn.Module] = {
    "torch.nn.modules.activation.Tanh": nn.Tanh(),
    "torch.nn.modules.activation.ReLU": nn.ReLU(),
    "torch.nn.modules.activation.GELU": nn.GELU(),
    "torch.nn.modules.activation.SiLU": nn.SiLU(),
    "torch.nn.modules.linear.Identity": nn.Identity(),
}


class Encoder(nn.Module):
    """Tokens of texts to vectors: a Hugging Face model without a head, pooling, dense heads, L2 normalisation.

    Attributes:
        has_layers: whether the backbone is a transformer; otherwise it has no blocks and no attention.
    """

    has_layers = True

    def __init__(
        self, backbone: PreTrainedModel, pooling: Pooling, *, normalize: bool, dense: Sequence[Dense] = ()
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.dense = nn.ModuleList(dense)
        self.pooling = pooling
        self.normalize = normalize
        self.exits: EarlyExits | None = None  # in training, the vectors after these layers are further outputs

    @property
    def dimension(self) -> int:
        """D, the dimension of the vectors."""
        return self.dense[-1].linear.out_features if len(self.dense) else hidden_size(self.backbone.config)  # type: ignore[union-attr, return-value]

    def stored_name(self, name: str) -> str:
        """The name of a weight or module, `backbone.NAME`, in the files of transformers and PEFT."""
        return name.removeprefix("backbone.")

    def forward(self, chunk: Chunk) -> Tensor | tuple[Tensor, ...]:
        """The N texts of a chunk to float32 vectors [N, D]; with `exits`, in training, a tuple: first the last layer's.

        Attention covers all real tokens, also those that are not pooled. For packed texts the backbone has to be
        prepared by `enable_packing`.
        """
        last = self.hidden_states(chunk)
        if self.exits is None or not self.training:
            return self.text_vectors(last, chunk)
        return tuple(self.text_vectors(hidden, chunk) for hidden in (last, *self.exits.pop()))

    def text_vectors(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        """The vectors [N, D] of texts from the hidden states of their tokens, [N, L, H], or [1, T, H] if packed."""
        if chunk.packing is not None:
            pooled = None if chunk.pooled is None else chunk.pooled[0]
            return self._apply_heads(pool_packed(hidden[0], pooled, chunk.packing, self.pooling))
        return self.vectors(hidden, chunk.mask if chunk.pooled is None else chunk.pooled)

    def hidden_states(self, chunk: Chunk) -> Tensor:
        """The last hidden states of all tokens, [N, L, H], or [1, T, H] of packed texts."""
        token_types = {} if chunk.types is None else {"token_type_ids": chunk.types}
        if chunk.packing is None:
            # Without a mask some models fail (custom code), others search the position ids for packed texts.
            with known_padding(chunk.has_padding):
                hidden: Tensor = self.backbone(
                    input_ids=chunk.ids, attention_mask=chunk.mask, **token_types
                ).last_hidden_state
            return hidden
        # Transformers passes a mask of four dimensions on unchanged, so it creates none.
        return self.backbone(  # type: ignore[no-any-return]
            input_ids=chunk.ids,
            attention_mask=chunk.ids.new_ones((1, 1, 1, 1)),
            position_ids=chunk.packing.positions + first_position(self.backbone),
            packing=chunk.packing,
            **token_types,
        ).last_hidden_state

    def vectors(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Apply pooling, heads and normalisation to token vectors [N, L, H] with the pooling mask [N, L]: [N, D]."""
        return self._apply_heads(pool(hidden, mask, self.pooling))

    def _apply_heads(self, vectors: Tensor) -> Tensor:
        for head in self.dense:
            vectors = head(vectors)
        vectors = vectors.float()
        return F.normalize(vectors, dim=-1) if self.normalize else vectors


def prepare_backbone(backbone: PreTrainedModel) -> PreTrainedModel:
    """Disable, in place, what an embedding model does not use and what would break its training.

    The pooler gets no gradient, which breaks DDP and optimizer checkpoints; a key-value cache grows with every
    recomputed layer and causes IndexErrors.
    """
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        backbone.pooler = None
    for part in backbone.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PretrainedConfig):
            disable_unused(config)
    return backbone


def disable_unused(config: PretrainedConfig) -> None:
    """Switch off `use_cache` and ModernBERT's own compilation in this configuration."""
    if getattr(config, "use_cache", None):
        config.use_cache = False
    if getattr(config, "reference_compile", None) is not False and hasattr(config, "reference_compile"):
        config.reference_compile = False


def first_position(backbone: nn.Module) -> int:
    """The position id of a text's first token: RoBERTa and its derivatives count from after the padding id."""
    embeddings = getattr(backbone, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1  # type: ignore[union-attr]
    return 0


def hidden_size(config: PretrainedConfig) -> int:
    """The size of a token vector."""
    return int(config.get_text_config().hidden_size)
