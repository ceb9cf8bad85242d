"""The learned sparse model: a backbone and the vocabulary head of its language model, texts to weights of words.

The head's transform is transformers' own class for the architecture: its forward runs with token vectors in place of
the backbone, and with `Decoder` in place of the last linear layer, which `word_weights` computes.

N: texts; L: tokens of a padded text; T: tokens of all texts; H: hidden size; V: words.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
)

from embedtrain.config.recipe import Pooling
from embedtrain.config.sparse import SparseActivation, SparsePooling
from embedtrain.data.types import Chunk
from embedtrain.errors import ModelError
from embedtrain.models.attention_mask import known_padding
from embedtrain.models.cross_encoder import PooledVectors, backbone_of, classifier_name
from embedtrain.models.encoder import Encoder, prepare_backbone
from embedtrain.models.sparse_head import TokenSpans, activate, word_weights
from embedtrain.models.static_queries import QueryWeights
from embedtrain.models.word_weights import WordWeights

# The largest difference between a word's weight and that of the whole class, by the type of the head's weight.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
_PROBE_LENGTHS = (5, 3)


class SparseEncoder(Encoder):
    """Tokens of texts to weights of words, most of which are 0 in a trained model.

    A head whose weight is the table of token embeddings has no weight of its own: the table is one parameter of the
    root's FSDP group, which is unsharded from the lookup to the head, and its two gradients are summed before they are
    reduced.

    Args:
        head: the class of the architecture's language model, from `split_language_model`.
        tied: whether the weight of the head is the table of token embeddings.
        query_weights: those of the tokens of queries, which are then not encoded; None: they are, as documents.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        head: PreTrainedModel,
        *,
        tied: bool,
        pooling: SparsePooling,
        activation: SparseActivation,
        query_weights: QueryWeights | None = None,
    ) -> None:
        super().__init__(backbone, Pooling.cls, normalize=False)
        self.head, self.tied, self.query_weights = head, tied, query_weights
        self.word_pooling, self.activation = pooling, activation
        self._calls_whole_class = False

    @property
    def dimension(self) -> int:
        """V, the words of the vocabulary."""
        return _num_words(self.backbone)

    @property
    def float32_head(self) -> QueryWeights | None:
        """The module that computes in float32."""
        return self.query_weights

    def stored_name(self, name: str) -> str:
        """The name of a weight or module in transformers' class."""
        return classifier_name(name, self.head.base_model_prefix)

    def forward(self, chunk: Chunk) -> Tensor:
        """The N texts of a chunk to the weights of all words, float32 [N, V]; `pooled` has no effect."""
        if self._calls_whole_class:
            return self._whole_class_weights(chunk)
        hidden, query_words = self.hidden_states(chunk), chunk.query_words
        looked_up: Tensor | None = None
        if self.query_weights is not None:
            looked_up, zero = self.query_weights(query_words)
            hidden = hidden + zero.to(hidden.dtype)
        if chunk.packing is not None:
            spans = TokenSpans.of_packed(chunk.packing)
        else:
            spans = TokenSpans.of_padded(chunk.mask, has_padding=chunk.has_padding)
        weights = self._word_weights(hidden, spans)
        if query_words is None or looked_up is None:
            return weights
        return torch.cat([weights, looked_up.to(weights.dtype)]).index_select(0, query_words.order)

    def vectors(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The weights of words from token vectors [N, L, H] with the mask [N, L]: [N, V]."""
        return self._word_weights(hidden, TokenSpans.of_padded(mask))

    def _word_weights(self, hidden: Tensor, spans: TokenSpans) -> Tensor:
        # Decoders' classes look for padding in the ids.
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        transformed = self.head(input_ids=ids, inputs_embeds=hidden).logits.flatten(0, 1)
        weight, bias = self._vocabulary()
        return word_weights(transformed.to(weight.dtype), weight, bias, spans, self.word_pooling, self.activation)

    def _whole_class_weights(self, chunk: Chunk) -> Tensor:
        decoder = decoder_of(self.head)
        decoder.vocabulary = self._vocabulary
        try:
            with known_padding(chunk.has_padding), backbone_of(self.head).calling(self.backbone):
                logits = self.head(input_ids=chunk.ids, attention_mask=chunk.mask).logits.float()
        finally:
            decoder.vocabulary = None
        weights = activate(logits, self.activation) * chunk.mask.unsqueeze(-1)
        return weights.amax(dim=1) if self.word_pooling is SparsePooling.max else weights.sum(dim=1)

    def _vocabulary(self) -> tuple[Tensor, Tensor | None]:
        """The weight [V, H] and the bias [V] of the head; unsharded within `forward`."""
        decoder = decoder_of(self.head)
        weight = self.backbone.get_input_embeddings().weight if self.tied else decoder.weight
        assert isinstance(weight, Tensor)
        return weight, decoder.current_bias

    @contextlib.contextmanager
    def calling_whole_class(self) -> Iterator[None]:
        """Compute the weights from the logits of transformers' class as a whole; only for padded texts."""
        self._calls_whole_class = True
        try:
            yield
        finally:
            self._calls_whole_class = False


class Decoder(nn.Module):
    """Stands for the last linear layer of a language model: returns what it receives.

    Args:
        weight: the layer's own; None if it is the table of token embeddings.
        bias: the layer's own; None if it has none, or if `owner`, the module around it, has it as `bias`.
    """

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None, owner: nn.Module | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._owner = [] if owner is None else [owner]  # a list, so that it is no submodule
        self.vocabulary: Any = None
        self.dtype = torch.float32  # of the weight in the last product with it

    @property
    def current_bias(self) -> Tensor | None:
        """The bias [V], wherever it is."""
        bias = self._owner[0].bias if self._owner else self.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] as it is."""
        if self.vocabulary is None:
            return hidden
        weight, bias = self.vocabulary()
        self.dtype = weight.dtype
        return nn.functional.linear(hidden, weight, bias)


def is_masked(config: PretrainedConfig) -> bool:
    """Whether the language model of the architecture is a masked one."""
    is_causal = any(name.endswith("ForCausalLM") for name in config.architectures or ())
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not is_causal


def language_model_class(config: PretrainedConfig) -> Any:
    """The class of transformers that opens a language model of the architecture."""
    return AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM


def language_model(config: PretrainedConfig) -> Any:
    """Transformers' own class for the architecture."""
    classes = MODEL_FOR_MASKED_LM_MAPPING if is_masked(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return classes[type(config)]


def split_language_model(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel, bool]:
    """The backbone of a language model, the model itself with stand-ins, and whether its head is tied to the embedding.

    A ModelError if the last layer of the model is not a linear layer of its vocabulary.
    """
    backbone, name, layer = model.base_model, model.base_model_prefix, model.get_output_embeddings()
    if backbone is model or not isinstance(layer, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear layer of its vocabulary, which weighs words")
    assert isinstance(backbone, PreTrainedModel)
    path = next(path for path, part in model.named_modules() if part is layer)
    parent = model.get_submodule(path.rpartition(".")[0])
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", True))
    # BERT and RoBERTa have the bias in the module around the layer as well: both are one, if weights are tied.
    has_outer_bias = isinstance(parent.__dict__["_parameters"].get("bias"), nn.Parameter)
    if has_outer_bias and not tied:
        parent.bias, has_outer_bias = None, False  # without an effect
    bias = layer.bias if isinstance(layer.bias, nn.Parameter) and not has_outer_bias else None
    weight = layer.weight if isinstance(layer.weight, nn.Parameter) and not tied else None
    decoder = Decoder(weight, bias, parent if has_outer_bias else None)
    setattr(parent, path.rpartition(".")[2], decoder)
    setattr(model, name, PooledVectors(None, in_float32=False))
    return prepare_backbone(backbone), model, tied


def sparse_encoder_of(model: PreTrainedModel, words: WordWeights) -> SparseEncoder:
    """The encoder of a language model, with the weights of queries 0."""
    backbone, head, tied = split_language_model(model)
    queries = None if words.queries is None else QueryWeights(_num_words(backbone), trained=words.queries.trained)
    return SparseEncoder(
        backbone, head, tied=tied, pooling=words.pooling, activation=words.activation, query_weights=queries
    )


def _num_words(backbone: nn.Module) -> int:
    return int(backbone.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]


def language_model_mismatch(encoder: SparseEncoder, device: torch.device) -> str | None:
    """Why weights of words differ from those of transformers' whole class; None if they do not.

    Two forward passes without gradient, which are collectives if the encoder is sharded: every rank must call. The
    encoder has weights and no dropout.
    """
    padding = encoder.backbone.config.get_text_config().pad_token_id
    tokens = [token for token in range(encoder.dimension) if token != padding][:11]
    width = max(_PROBE_LENGTHS)
    ids = torch.tensor([(tokens * width)[7 * n : 7 * n + width] for n in range(len(_PROBE_LENGTHS))], device=device)
    mask = (torch.arange(width, device=device) < torch.tensor(_PROBE_LENGTHS, device=device)[:, None]).long()
    ids = torch.where(mask.bool(), ids, padding or 0)
    with torch.no_grad():
        weights = encoder(Chunk(ids, mask))
        with encoder.calling_whole_class():
            expected = encoder(Chunk(ids, mask))
    difference, tolerance = float((weights - expected).abs().max()), _TOLERANCES[decoder_of(encoder.head).dtype]
    return None if difference <= tolerance else f"weights of words differ by {difference:.2g} from its own logits'"


def decoder_of(head: PreTrainedModel) -> Decoder:
    """What stands for the last layer in a head."""
    return next(part for part in head.modules() if isinstance(part, Decoder))
