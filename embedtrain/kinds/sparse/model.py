"""Learned sparse models: the vocabulary head of a language model, and queries as weights of their tokens.

The head's transform is transformers' own class for the architecture: its forward runs with hidden states in place of
the backbone, and with `Decoder` in place of the last linear layer, which `word_weights` computes.

Static queries are not encoded: their weights are in a file, or inverse document frequencies of the training documents.

N: texts; L: tokens of a padded text; T: tokens of all texts; H: hidden size; V: words.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embedtrain.config.kind_settings import IDF, SparsePooling, StaticQueries, WordWeights
from embedtrain.data.cache.token_store import TokenStore
from embedtrain.data.tokens import UNLIMITED, FastTokenizer, Layout
from embedtrain.data.types import IS_QUERY, Chunk, QueryWords, TextRole, Tokens
from embedtrain.distributed.collectives import sum_over_ranks
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.sentence_transformers import QUERY_FOLDER, WEIGHTS
from embedtrain.formats.transformers import read_tokenizer
from embedtrain.models.build import read_model
from embedtrain.models.encoder import Encoder, prepare_backbone
from embedtrain.models.file_references import read_json
from embedtrain.models.own_class import ClassHead, StandIn, language_model_class, own_name
from embedtrain.models.sparse_head import QUERY_WEIGHTS, STORED_WEIGHT, QueryWeights, TokenSpans, activate, word_weights
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

# The largest difference between a word's weight and that of the whole class, by the type of the head's weight.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
_TEXT = 1 << 32  # tokens of a query have fewer bits
_PROBES = ("What is the capital of France?", "  UPPER case,\ttwo\n\nlines, 1234 + 5678", "naïve café, 東京タワー")
# In OpenSearch's directories: a mapping of tokens to weights.
IDF_FILE = "idf.json"
_BLOCK_TEXTS = 1 << 16  # of a document store at a time


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

    @property
    def beside_adapters(self) -> dict[str, nn.Module]:
        """None: the vocabulary head is in the files."""
        return {}

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


class StaticQueryLayout(Layout):
    """Documents, which are encoded, and queries, which have no special tokens and are not."""

    roles_differ: ClassVar[bool] = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._queries = FastTokenizer(tokenizer, special_tokens=False)

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts. A query without tokens has `nothing`, which has no weight."""
        if role is TextRole.document:
            return super().tokenize(texts, limit)
        ids = self._queries.ids(list(texts), limit) if texts else []
        return Tokens.of([text or [self.nothing] for text in ids])

    def lay_out(self, tokens: Tokens, are_queries: NDArray[np.bool_]) -> Tokens:
        """The same tokens, with those of queries flagged IS_QUERY."""
        flags = np.where(np.repeat(are_queries, tokens.lengths), IS_QUERY, np.uint8(0))
        return Tokens(tokens.ids, flags, tokens.lengths)

    def costs(self, lengths: NDArray[np.int64], are_queries: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The encoder computes nothing for a query."""
        return np.where(are_queries, 1, lengths)

    def chunk(self, tokens: Tokens, rows: Sequence[int], *, packed: bool) -> Chunk:
        """Texts as one chunk, of which documents are encoded; at least one text is, because all ranks compute."""
        is_query = tokens.flags[np.cumsum(tokens.lengths) - tokens.lengths] & IS_QUERY != 0
        if not is_query.any():
            return super().chunk(tokens, rows, packed=packed)
        documents, queries = (tokens.take(np.flatnonzero(selected)) for selected in (~is_query, is_query))
        encoded = documents if len(documents) else super().tokenize(["a"], UNLIMITED)
        chunk = super().chunk(encoded, rows, packed=packed)
        order = np.empty(len(tokens), dtype=np.int64)
        order[~is_query] = np.arange(len(documents))
        order[is_query] = len(encoded) + np.arange(len(queries))
        words, owners = queries.ids.astype(np.int64), np.repeat(np.arange(len(queries)), queries.lengths)
        is_word = (words != self.nothing) | (queries.lengths[owners] > 1)
        # Each token counts once.
        keys = np.unique(owners[is_word] * _TEXT + words[is_word])
        chunk.query_words = QueryWords(
            words=torch.from_numpy(keys % _TEXT),
            queries=torch.from_numpy(keys // _TEXT),
            count=len(queries),
            order=torch.from_numpy(order),
        )
        return chunk

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and lengths."""
        return (self.nothing, "queries without special tokens")


def static_query_layout(
    queries: StaticQueries, num_words: int, tokenizer: PreTrainedTokenizerBase
) -> StaticQueryLayout:
    """A ConfigError if sentence-transformers could not open the model, a ModelError if queries have other tokens."""
    if len(tokenizer.get_vocab()) != num_words:
        raise ConfigError(
            f"model.queries=static: the tokenizer has {len(tokenizer.get_vocab()):,} tokens and the model "
            f"weights of {num_words:,} words, which sentence-transformers cannot compare; write encoded"
        )
    layout = StaticQueryLayout(tokenizer)
    if queries.path is not None and (queries.path.parent / "tokenizer_config.json").is_file():
        own = read_tokenizer(queries.path.parent, trust_remote_code=False)
        expected, stored = (
            of.tokenize(_PROBES, UNLIMITED, role=TextRole.query).lists() for of in (layout, StaticQueryLayout(own))
        )
        if own.get_vocab() != tokenizer.get_vocab() or stored != expected:
            raise ModelError(
                f"{queries.path.parent} has another tokenizer than the model's documents, which is not supported"
            )
    return layout


def read_query_weights(queries: StaticQueries, directory: Path | None, num_words: int) -> Tensor:
    """The weight of each word, float32 [V], from its file; 0 if there is none, because it is computed later.

    Tokens that a JSON file does not name have the weight 0; `directory` holds the tokenizer. Raises ModelError.
    """
    if queries.path is None:
        return torch.zeros(num_words)
    if queries.path.suffix != ".json":
        return _read_safetensors(queries.path, num_words)
    if directory is None:
        raise ConfigError(
            f"model.query_weights={queries.path}: needs the tokenizer of a model; set model.path, or write {IDF}"
        )
    return weights_of_json(queries.path, read_tokenizer(directory, trust_remote_code=False), num_words)


def weights_of_json(path: Path, tokenizer: PreTrainedTokenizerBase, num_words: int) -> Tensor:
    """The weight of each word, float32 [V], from a mapping of tokens to weights."""
    vocabulary, weights = tokenizer.get_vocab(), torch.zeros(num_words)
    for token, weight in read_json(path).items():
        if token not in vocabulary:
            raise ModelError(f"{path} has the token {token!r:.200}, which the model's tokenizer does not have")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ModelError(f"{path}: the weight {weight!r:.200} of {token!r:.200} is not a finite number")
        weights[vocabulary[token]] = weight
    return weights


def describe_static_queries(queries: StaticQueries) -> str:
    """Where the weights are from, for the user."""
    origin = "computed from the documents of data.train" if queries.path is None else f"from {queries.path}"
    return f"static queries with {'trained' if queries.trained else 'frozen'} weights {origin}"


def write_idf(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the weights of an export as OpenSearch reads them."""
    weights = _read_safetensors(directory / QUERY_FOLDER / WEIGHTS, None).tolist()
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    write_json(directory / IDF_FILE, {token: weights[number] for token, number in tokens if weights[number]})


def _read_safetensors(path: Path, num_words: int | None) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            shape = file.get_slice(STORED_WEIGHT).get_shape()
            fits = len(shape) == 1 and num_words in (None, shape[0])
            weights: Tensor | None = file.get_tensor(STORED_WEIGHT).float() if fits else None
    except Exception as error:  # safetensors does not export its exception type
        raise ModelError(f"{path} cannot be read as safetensors with `{STORED_WEIGHT}`: {error}") from None
    if weights is None or not weights.isfinite().all():
        raise ModelError(f"{path}: {STORED_WEIGHT} {shape} must be a finite number for each of {num_words} words")
    return weights


def inverse_document_frequencies(stores: Sequence[TokenStore], num_tokens: int, world: World) -> Tensor:
    """ln(1 + (N - n + 0.5) / (n + 0.5)) of each token, float32 [V] on the CPU, as in BM25. A collective.

    N are the distinct documents of all stores, as they are truncated for training, and n those with the token. The
    ranks count disjoint parts of the documents, which depend on their texts alone.
    """
    counted = np.empty(0, dtype=np.int64)
    counts, number = np.zeros(num_tokens, dtype=np.int64), 0
    for store in stores:
        documents = _local_documents(store, world)
        keys, first = np.unique(store.keys[documents], return_index=True)
        is_new = ~np.isin(keys, counted, assume_unique=True)
        counted = np.concatenate([counted, keys[is_new]])
        documents = np.sort(documents[first[is_new]])
        number += len(documents)
        for start in range(0, len(documents), _BLOCK_TEXTS):
            counts += _document_frequencies(store, documents[start : start + _BLOCK_TEXTS], num_tokens)
    local = torch.from_numpy(np.append(counts, number)).double()
    total = sum_over_ranks(local.to(world.device)).cpu()
    frequencies, documents_of_all = total[:-1], total[-1]
    return torch.log1p((documents_of_all - frequencies + 0.5) / (frequencies + 0.5)).float()


def _local_documents(store: TokenStore, world: World) -> NDArray[np.int64]:
    """The documents of a store that this rank counts, by their keys: equal texts are on one rank."""
    return np.concatenate([np.empty(0, dtype=np.int64), *_blocks_of_documents(store, world)])


def _blocks_of_documents(store: TokenStore, world: World) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(store.keys), _BLOCK_TEXTS):
        keys = store.keys[start : start + _BLOCK_TEXTS]
        is_local = keys % world.size == world.rank
        bounds = np.searchsorted(store.row_starts, [start, start + len(keys)])
        # The first text of a row is the query.
        is_local[store.row_starts[bounds[0] : bounds[1]] - start] = False
        yield start + np.flatnonzero(is_local)


def _document_frequencies(store: TokenStore, documents: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
    """In how many of these documents each token is, int64 [V]."""
    lengths = store.lengths(documents)
    texts = np.repeat(np.arange(len(documents)), lengths)
    pairs = np.unique(texts * num_tokens + store.tokens(documents).ids)
    return np.bincount(pairs % num_tokens, minlength=num_tokens)
