"""The cross-encoder: a backbone and the head of its sequence classification in one module, pairs of texts to scores.

The head is transformers' own class for the architecture. Its forward runs with pooled token vectors in place of the
backbone, so every architecture keeps its own pooler, activation and dropout, and packed pairs need no other code.

N: pairs; L: tokens of a padded pair; H: hidden size.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk
from embedtrain.models.attention_mask import known_padding
from embedtrain.models.encoder import Encoder, prepare_backbone

HEAD = "head."
# The largest difference between a score and that of the whole class, relative to the larger one of the score and 1.
_TOLERANCE = 1e-3
_PROBE_LENGTHS = (5, 3)


class CrossEncoder(Encoder):
    """Tokens of pairs to scores: raw logits, before the sigmoid that turns them into probabilities.

    The head computes in float32 whatever the precision of the backbone: in bf16 most of the best candidates of a query
    would have the same score.

    Args:
        head: the class of the architecture's sequence classification, from `split_classifier`.
        pooling: which token vector the head receives.
    """

    def __init__(self, backbone: PreTrainedModel, head: PreTrainedModel, pooling: Pooling) -> None:
        super().__init__(backbone, pooling, normalize=False)
        self.head = head
        self._returns_vectors = self._calls_whole_class = False

    @property
    def float32_head(self) -> PreTrainedModel:
        """The module that computes in float32."""
        return self.head

    @property
    def dimension(self) -> int:
        """1, the score."""
        return 1

    def stored_name(self, name: str) -> str:
        """The name of a weight or module in transformers' class."""
        return classifier_name(name, self.head.base_model_prefix)

    @property
    def head_modules(self) -> list[str]:
        """The parts of the head with weights, by their names in transformers' class."""
        named = {name: part for name, part in self.head.named_children() if not isinstance(part, PooledVectors)}
        pooler = backbone_of(self.head).pooler
        named |= {} if pooler is None else {f"{self.head.base_model_prefix}.pooler": pooler}
        return [name for name, part in named.items() if next(part.parameters(), None) is not None]

    def forward(self, chunk: Chunk) -> Tensor:
        """The N pairs of a chunk to float32 scores [N, 1]."""
        if not self._calls_whole_class:
            return self.text_vectors(self.hidden_states(chunk), chunk)
        token_types = {} if chunk.types is None else {"token_type_ids": chunk.types}
        with known_padding(chunk.has_padding), backbone_of(self.head).calling(self.backbone):
            scores: Tensor = self.head(input_ids=chunk.ids, attention_mask=chunk.mask, **token_types).logits
        return scores.float()

    def _apply_heads(self, vectors: Tensor) -> Tensor:
        if self._returns_vectors:
            return vectors
        vectors = vectors.to(next(self.head.parameters()).dtype)  # float32, except where memory is estimated
        # Decoders' classes look for padding in the ids: one token each, and none of them is padding.
        ids = torch.zeros((len(vectors), 1), dtype=torch.int64, device=vectors.device)
        scores: Tensor = self.head(input_ids=ids, inputs_embeds=vectors[:, None]).logits
        return scores.float()

    @contextlib.contextmanager
    def returning_vectors(self) -> Iterator[None]:
        """Return the pooled vectors [N, H] that the head receives, instead of scores."""
        self._returns_vectors = True
        try:
            yield
        finally:
            self._returns_vectors = False

    @contextlib.contextmanager
    def calling_whole_class(self) -> Iterator[None]:
        """Call transformers' class as a whole, with its own selection of a token; only for padded pairs."""
        self._calls_whole_class = True
        try:
            yield
        finally:
            self._calls_whole_class = False


class PooledVectors(nn.Module):
    """Stands for the backbone in the head: returns the vectors that it receives, and the pooler's output of them.

    Args:
        pooler: the backbone's, for classes whose head receives its output; None if there is none.
        activation: of a pooler that is a linear layer only (ALBERT); other poolers take the first token themselves.
        in_float32: whether the head is computed in float32 in any precision, and receives such vectors.
    """

    def __init__(
        self, pooler: nn.Module | None, activation: nn.Module | None = None, *, in_float32: bool = True
    ) -> None:
        super().__init__()
        self.in_float32 = in_float32
        self.pooler = pooler
        self.pooler_activation = activation
        self._backbone: list[nn.Module] = []  # a list, so that it is no submodule

    def forward(
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Vectors [N, 1, H], or the arguments of the backbone within `calling`."""
        hidden = inputs_embeds
        if self._backbone:
            hidden = self._backbone[0](*args, **kwargs).last_hidden_state
            hidden = hidden.float() if self.in_float32 else hidden
        assert hidden is not None
        pooled = None
        if self.pooler_activation is not None and self.pooler is not None:
            pooled = self.pooler_activation(self.pooler(hidden[:, 0]))
        elif self.pooler is not None:
            pooled = self.pooler(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)

    @contextlib.contextmanager
    def calling(self, backbone: nn.Module) -> Iterator[None]:
        """Call the backbone, as in the class as it is."""
        self._backbone = [backbone]
        try:
            yield
        finally:
            self._backbone = []


def split_classifier(classifier: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The backbone of a sequence classifier, and the classifier itself with `PooledVectors` in its place."""
    backbone, name = classifier.base_model, classifier.base_model_prefix
    assert isinstance(backbone, PreTrainedModel)
    pooler, activation = getattr(backbone, "pooler", None), getattr(backbone, "pooler_activation", None)
    setattr(classifier, name, PooledVectors(pooler if isinstance(pooler, nn.Module) else None, activation))
    # A configuration of its own: decoders' classes reject several rows without a padding token.
    classifier.config = copy.deepcopy(classifier.config)
    config = classifier.config.get_text_config()
    config.pad_token_id = 0 if config.pad_token_id is None else config.pad_token_id
    return prepare_backbone(backbone), classifier


def classifier_name(name: str, prefix: str) -> str:
    """The name that a weight of a CrossEncoder has in transformers' class, whose `base_model_prefix` is `prefix`."""
    return name.removeprefix(HEAD) if name.startswith(HEAD) else f"{prefix}.{name.removeprefix('backbone.')}"


def classifier_mismatch(encoder: CrossEncoder, device: torch.device) -> str | None:
    """Why scores differ from those of transformers' whole class; None if they do not.

    Two forward passes without gradient over padded pairs, which are collectives if the encoder is sharded: every rank
    must call. The encoder has weights and no dropout.
    """
    config = encoder.head.config.get_text_config()
    padding = int(config.pad_token_id)
    tokens = [token for token in range(int(config.vocab_size)) if token != padding][:11]
    width = max(_PROBE_LENGTHS)
    ids = torch.tensor([(tokens * width)[7 * n : 7 * n + width] for n in range(len(_PROBE_LENGTHS))], device=device)
    mask = (torch.arange(width, device=device) < torch.tensor(_PROBE_LENGTHS, device=device)[:, None]).long()
    ids = torch.where(mask.bool(), ids, padding)
    types = mask * (torch.arange(width, device=device) >= 2) if has_token_types(encoder) else None
    with torch.no_grad():
        scores = encoder(Chunk(ids, mask, types=types))
        with encoder.calling_whole_class():
            expected = encoder(Chunk(ids, mask, types=types))
    if scores.shape != expected.shape or scores.shape[1] != 1:
        return f"it returns {tuple(expected.shape)[1:]} numbers for a pair"
    difference = float(((scores - expected).abs() / expected.abs().clamp(min=1.0)).max())
    return None if difference <= _TOLERANCE else f"scores differ by {difference:.2g} from those of its own forward"


def has_token_types(encoder: Encoder) -> bool:
    """Whether the backbone distinguishes the two texts of a pair by token types."""
    return int(getattr(encoder.backbone.config.get_text_config(), "type_vocab_size", 0) or 0) > 1


def backbone_of(head: PreTrainedModel) -> PooledVectors:
    """What stands for the backbone in a head."""
    return next(part for part in head.children() if isinstance(part, PooledVectors))
