"""The head of learned sparse models: the vocabulary head of a language model, texts to weights of words.

The head's transform is transformers' own class for the architecture: its forward runs with hidden states in place of
the backbone, and with `Decoder` in place of the last linear layer, which `word_weights` computes.

N: texts; L: tokens of a padded text; T: tokens of all texts; H: hidden size; V: words.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from embedtrain.config.sparse import SparsePooling
from embedtrain.data.types import Chunk
from embedtrain.errors import ModelError
from embedtrain.models.build import read_model
from embedtrain.models.encoder import Encoder, prepare_backbone
from embedtrain.models.own_class import ClassHead, StandIn, language_model_class, own_name
from embedtrain.models.sparse_head import TokenSpans, activate, word_weights
from embedtrain.models.static_queries import QUERY_WEIGHTS, QueryWeights, read_query_weights
from embedtrain.models.types import ModelSource
from embedtrain.models.word_weights import WordWeights

# The largest difference between a word's weight and that of the whole class, by the type of the head's weight.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}


class WordHead(ClassHead):
    """Weights of words, most of which are 0 in a trained model.

    A head whose weight is the table of token embeddings has no weight of its own: the table is one parameter of the
    root's FSDP group, which is unsharded from the lookup to the head, and its two gradients are summed before they are
    reduced.

    Args:
        model: the class of the architecture's language model, with stand-ins.
        backbone: its own.
        tied: whether the weight of the head is the table of token embeddings.
    """

    has_vocabulary = True

    def __init__(self, model: PreTrainedModel, backbone: PreTrainedModel, words: WordWeights, *, tied: bool) -> None:
        super().__init__(model)
        self.backbone, self.ties_embeddings = backbone, tied
        self.dimension = int(backbone.config.get_text_config().vocab_size)
        self.pooling, self.activation = words.pooling, words.activation
        # Those of the tokens of queries, which are then not encoded; None: they are, as documents.
        self.query_weights: QueryWeights | None = None
        if words.queries is not None:
            self.query_weights = self.in_float32 = QueryWeights(self.dimension, trained=words.queries.trained)
            self.modules["query_weights"] = self.query_weights

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The weights of all words, [N, V]; `pooled` has no effect."""
        query_words, looked_up = chunk.query_words, None
        if self.query_weights is not None:
            looked_up, zero = self.query_weights(query_words)
            hidden = hidden + zero.to(hidden.dtype)
        if chunk.packing is not None:
            spans = TokenSpans.of_packed(chunk.packing)
        else:
            spans = TokenSpans.of_padded(chunk.mask, has_padding=chunk.has_padding)
        transformed = self.logits(hidden).flatten(0, 1)
        weight, bias = self._vocabulary()
        weights = word_weights(transformed.to(weight.dtype), weight, bias, spans, self.pooling, self.activation)
        if query_words is None or looked_up is None:
            return (weights,)
        return (torch.cat([weights, looked_up.to(weights.dtype)]).index_select(0, query_words.order),)

    def of_whole_class(self, chunk: Chunk, backbone: nn.Module) -> Tensor:
        """The weights of words from the logits of all tokens of padded texts."""
        decoder = decoder_of(self.model)
        decoder.vocabulary = self._vocabulary
        try:
            logits = self.whole_logits(chunk, backbone)
        finally:
            decoder.vocabulary = None
        weights = activate(logits, self.activation) * chunk.mask.unsqueeze(-1)
        return weights.amax(dim=1) if self.pooling is SparsePooling.max else weights.sum(dim=1)

    def difference(self, actual: Tensor, expected: Tensor) -> str | None:
        """Why weights of words are not those of the whole class; None if they are."""
        difference, tolerance = float((actual - expected).abs().max()), _TOLERANCES[decoder_of(self.model).dtype]
        if difference <= tolerance:
            return None
        return f"weights of words differ by {difference:.2g} from its own logits'"

    def _vocabulary(self) -> tuple[Tensor, Tensor | None]:
        """The weight [V, H] and the bias [V] of the head; unsharded within a forward pass."""
        decoder = decoder_of(self.model)
        weight = self.backbone.get_input_embeddings().weight if self.ties_embeddings else decoder.weight
        assert isinstance(weight, Tensor)
        return weight, decoder.current_bias


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


def sparse_encoder(model: PreTrainedModel, words: WordWeights) -> Encoder:
    """The encoder of a language model, which becomes its head with stand-ins; the weights of queries are 0.

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
    setattr(model, name, StandIn(None, in_float32=False))
    return Encoder(prepare_backbone(backbone), WordHead(model, backbone, words, tied=tied))


def decoder_of(model: PreTrainedModel) -> Decoder:
    """What stands for the last layer in a class."""
    return next(part for part in model.modules() if isinstance(part, Decoder))


def read_weights(source: ModelSource) -> tuple[dict[str, Tensor], set[str]]:
    """The weights of a source's files, by the encoder's names, and the names of those that they lack."""
    model, missing = read_model(source, language_model_class(source.config), source.config)
    weights = sparse_encoder(model, source.settings).state_dict() | query_weights(source)
    return weights, {name for name in weights if own_name(name, model.base_model_prefix) in missing}


def query_weights(source: ModelSource) -> dict[str, Tensor]:
    """The weights of the tokens of queries, by the encoder's name; nothing if queries are encoded."""
    if source.settings.queries is None:
        return {}
    return {QUERY_WEIGHTS: read_query_weights(source.settings.queries, source.directory, source.dimension)}
