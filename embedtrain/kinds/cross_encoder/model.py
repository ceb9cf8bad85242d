"""Cross-encoders: pairs of a query and a document as input, and the head, which turns pairs into scores.

Both texts are tokenised separately, without special tokens, and joined by ids. Tokenizers do the same: special tokens
separate the two texts, so no token spans both. The tokens of a query that has many documents are therefore computed and
cached once.

The head is that of transformers' class for sequence classification.

N: pairs; L: tokens of a padded pair; H: hidden size.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from embedtrain.config.kind_settings import PairTemplate
from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option, written
from embedtrain.data.rows import NO_PROMPT, Prompt
from embedtrain.data.tokens import TOKENIZER_LOCK, UNLIMITED, FastTokenizer, Layout
from embedtrain.data.types import (
    SECOND_SEGMENT,
    BatchTokens,
    Chunk,
    EncoderInputs,
    Pair,
    TextRole,
    Tokens,
    gather_ranges,
)
from embedtrain.errors import ConfigError, ModelError
from embedtrain.kinds.cross_encoder.source import HeadSource
from embedtrain.models.attention_direction import is_decoder
from embedtrain.models.build import build_encoder, read_model
from embedtrain.models.encoder import Encoder, hidden_size, prepare_backbone
from embedtrain.models.own_class import HEAD, ClassHead, StandIn, located_in_class, own_name, stand_in_of
from embedtrain.models.pooling import POOLING, PooledTokens
from embedtrain.models.stored_weights import TensorLocation, stored_tensors
from embedtrain.models.types import ModelSource
from embedtrain.utils.formatting import one_line

_FIRST = np.uint8(0)  # flags of tokens of the first segment
_WINDOW_OVERLAP = 80  # tokens
_MAX_TEMPLATE = 100_000  # tokens
_ROWS_READ = 1 << 14  # of a vocabulary head at a time
# A tokenizer's own pairs of these texts are compared with ours.
_PROBES = [
    ("a", "b"),
    ("What is it?", " two  words\n"),
    ("Ünïcödé, 中文", "123 <s> [SEP]"),
    ("many words " * 9, "so many " * 9),
]
_PROBE_TOKENS = (8, 11, 500)  # tokens of both texts, besides those of the template
_MAX_PROBE = 10_000  # tokens of a probe with a template
# The weight of a score of tokens, and where the rows that it starts from are stored.
SCORE, VOCABULARY_HEAD, _EMBEDDINGS = f"{HEAD}score.weight", "lm_head.weight", "embed_tokens.weight"
# The largest difference between a score and that of the whole class, relative to the larger one of the score and 1.
_TOLERANCE = 1e-3


class PairTruncation(str, Enum):
    """Which text of a pair is cut if both do not fit."""

    longest_first = "longest_first"  # the longer one, then both alike
    only_second = "only_second"  # the document


@dataclass(frozen=True, slots=True)
class PairFormat:
    """How the tokens of two texts become the input of a cross-encoder: before, query, between, document, after."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    second_type: int = 0  # token type of the document and of what follows it; other tokens have type 0
    truncation: PairTruncation = PairTruncation.longest_first
    # With `only_second`, the query has at most this fraction of the tokens between `before` and `after`.
    max_query_fraction: float = 1.0
    from_left: bool = False  # whether truncation removes the beginning of a text
    query: Prompt = NO_PROMPT  # text that is tokenised with a query, around it and its prompt
    document: Prompt = NO_PROMPT

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, token_types: bool = False) -> "PairFormat":
        """The format of the tokenizer's own pairs, for a model with or without token types.

        Raises a ModelError if joined ids differ from the tokenizer's, which would change every score.
        """
        contents = FastTokenizer(tokenizer, special_tokens=False)
        query, document = contents.ids(list(_PROBES[0]), _MAX_PROBE)
        pair = _own_pair(tokenizer, *_PROBES[0], _MAX_PROBE, token_types=token_types)
        for first, second in itertools.product(_find(pair.ids, query), _find(pair.ids, document)):
            if second < first + len(query):
                continue
            pair_format = cls(
                before=tuple(pair.ids[:first]),
                between=tuple(pair.ids[first + len(query) : second]),
                after=tuple(pair.ids[second + len(document) :]),
                second_type=pair.types[second],
                from_left=tokenizer.truncation_side == "left",
            )
            if all(
                pair_format._joins_as(tokenizer, contents.ids([*texts], _MAX_PROBE), texts, token_types)
                for texts in _PROBES
            ):
                return pair_format
        raise ModelError(
            f"the pair {_PROBES[0]} has other tokens with {type(tokenizer).__name__} than its two texts with special "
            "tokens between them: this tokenizer cannot be used for a cross-encoder"
        )

    def _joins_as(
        self, tokenizer: PreTrainedTokenizerBase, ids: list[list[int]], texts: tuple[str, str], token_types: bool
    ) -> bool:
        """Whether the tokenizer's own pair of texts with these ids is the same, whatever the length."""
        for length in (self.num_special + max_tokens for max_tokens in _PROBE_TOKENS):
            joined = self.join(Tokens.of(ids[:1]), Tokens.of(ids[1:]), length)
            types = np.where(joined.flags & SECOND_SEGMENT, self.second_type, 0).tolist()
            pair = _OwnPair(joined.ids.tolist(), types)
            if pair != _own_pair(tokenizer, *texts, length, token_types=token_types):
                return False
        return True

    @property
    def num_special(self) -> int:
        """Tokens of a pair besides those of its texts."""
        return len(self.before) + len(self.between) + len(self.after)

    def fit(
        self, query_lengths: NDArray[np.int64], document_lengths: NDArray[np.int64], max_length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that pairs keep of their queries and documents, int64 [N] each.

        Texts are limited to `max_length` before: if both exceed it, the query counts as the shorter one, where a
        tokenizer compares whole texts.
        """
        max_tokens = max(0, max_length - self.num_special)
        queries, documents = query_lengths, document_lengths
        if self.truncation is PairTruncation.longest_first:
            shorter = np.minimum(queries, documents)
            # The longer text is cut to what the shorter one leaves; if that is less, both get half, and the text that
            # was longer gets the odd token (as the tokenizers library does, 0.23).
            longer = np.maximum(shorter, max_tokens - shorter)
            halves = shorter + longer > max_tokens
            shorter, longer = (
                np.where(halves, max_tokens // 2, shorter),
                np.where(halves, max_tokens - max_tokens // 2, longer),
            )
            swapped = queries > documents
            limits = np.where(swapped, longer, shorter), np.where(swapped, shorter, longer)
            return np.minimum(queries, limits[0]), np.minimum(documents, limits[1])
        between_ends = max(0, max_length - len(self.before) - len(self.after))
        queries = np.minimum(queries, min(max_tokens, int(between_ends * self.max_query_fraction)))
        return queries, np.minimum(documents, max_tokens - queries)

    def join(self, queries: Tokens, documents: Tokens, max_length: int) -> Tokens:
        """N pairs from the tokens of both texts; those of type `second_type` are flagged SECOND_SEGMENT."""
        kept_queries, kept_documents = self.fit(queries.lengths, documents.lengths, max_length)
        return self.surround(self._cut(queries, kept_queries), self._cut(documents, kept_documents))

    def surround(self, queries: Tokens, documents: Tokens) -> Tokens:
        """N pairs from the tokens of both texts, of which nothing is cut."""
        lengths = queries.lengths + documents.lengths + self.num_special
        total = int(lengths.sum())
        joined = Tokens(np.empty(total, dtype=np.int32), np.zeros(total, dtype=np.uint8), lengths)

        def put(texts: Tokens, starts: NDArray[np.int64], flag: np.uint8 = _FIRST) -> NDArray[np.int64]:
            before = np.cumsum(texts.lengths) - texts.lengths
            places = np.repeat(starts - before, texts.lengths) + np.arange(len(texts.ids))
            joined.ids[places], joined.flags[places] = texts.ids, texts.flags | flag
            return starts + texts.lengths

        def put_all(ids: tuple[int, ...], starts: NDArray[np.int64], flag: np.uint8 = _FIRST) -> NDArray[np.int64]:
            for number, token in enumerate(ids):
                joined.ids[starts + number], joined.flags[starts + number] = token, flag
            return starts + len(ids)

        start = put_all(self.before, np.cumsum(lengths) - lengths)
        start = put_all(self.between, put(queries, start))
        put_all(self.after, put(documents, start, SECOND_SEGMENT), SECOND_SEGMENT)
        return joined

    def _cut(self, texts: Tokens, kept: NDArray[np.int64]) -> Tokens:
        starts = np.cumsum(texts.lengths) - texts.lengths
        starts = starts + texts.lengths - kept if self.from_left else starts
        return Tokens.plain(gather_ranges(texts.ids, starts, kept), kept)


class _OwnPair(NamedTuple):
    ids: list[int]
    types: list[int]


def _own_pair(
    tokenizer: PreTrainedTokenizerBase, query: str, document: str, max_length: int, *, token_types: bool
) -> _OwnPair:
    """What the tokenizer itself makes of a pair."""
    token_types = token_types and "token_type_ids" in tokenizer.model_input_names
    with TOKENIZER_LOCK:
        encoded = tokenizer(
            query, document, truncation="longest_first", max_length=max_length, return_token_type_ids=token_types
        )
    ids: list[int] = encoded["input_ids"]
    return _OwnPair(ids, encoded["token_type_ids"] if token_types else [0] * len(ids))


def _find(ids: list[int], part: list[int]) -> list[int]:
    """The indices where `part` begins in `ids`: in a template, a token of a text may occur before the text."""
    return [index for index in range(len(ids) - len(part) + 1) if ids[index : index + len(part)] == part]


class PairLayout(Layout):
    """Pairs as complete inputs; texts alone are tokens without special tokens, perhaps none.

    Args:
        pair_format: the format that the model is trained with.
    """

    dummy = Pair("a", "a")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pair_format: PairFormat) -> None:
        super().__init__(tokenizer, special_tokens=False)
        self.pair_format, self.second_type = pair_format, pair_format.second_type
        self.num_pair_tokens = pair_format.num_special

    def check(self, max_length: int) -> None:
        """Raise a ModelError if a pair has no room for texts."""
        if max_length <= self.pair_format.num_special:
            raise ModelError(
                f"{model_option('max_length')}={max_length} leaves no room for texts: a pair has "
                f"{self.pair_format.num_special} "
                "tokens besides those of its texts"
            )

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts, which `query_prompt` and `document_prompt` have formatted."""
        return Tokens.of(self.fast.ids([str(text) for text in texts], limit) if texts else [])

    def tokens(
        self, texts: Sequence[str] | Sequence[Pair], limit: int, prompts: str | Sequence[str], role: TextRole
    ) -> Tokens:
        """The tokens of texts, or of pairs, whose texts are formatted here; a list has texts or pairs."""
        pairs = [text for text in texts if isinstance(text, Pair)]
        if not pairs:
            return self.tokenize(cast(Sequence[str], texts), limit)
        has_windows = any(pair.start is not None for pair in pairs)
        queries, documents = self._contents(pairs, UNLIMITED if has_windows else limit)
        if has_windows:
            # Both texts are cut here: with another length of the document, the query would be cut otherwise.
            kept = zip(*self.pair_format.fit(queries.lengths, documents.lengths, limit), strict=True)
            cut: tuple[list[list[int]], list[list[int]]] = ([], [])
            texts_of_pairs = zip(pairs, queries.lists(), documents.lists(), kept, strict=True)
            for pair, query, document, (num_query, num_document) in texts_of_pairs:
                first = len(query) - num_query if self.pair_format.from_left else 0
                is_window = pair.start is not None
                cut[0].append(query[first : first + num_query] if is_window else query)
                cut[1].append(document[pair.start : pair.start + num_document] if pair.start is not None else document)
            queries, documents = map(Tokens.of, cut)
        return self.join(queries, documents, limit)

    def join(self, queries: Tokens, documents: Tokens, max_length: int) -> Tokens:
        """N pairs from the tokens of their texts."""
        return self.pair_format.join(queries, documents, max_length)

    def windows(self, items: Sequence[Pair], max_length: int) -> NDArray[np.int64]:
        """For each pair, the number of windows that its document takes, and the tokens from one to the next: [N, 2].

        A document that fits is one window. The windows of a longer one overlap by 80 tokens, or by a quarter of a
        window if that is less, as in BCEmbedding's RerankerModel.
        """
        queries, documents = self._contents(items, UNLIMITED)
        _, sizes = self.pair_format.fit(queries.lengths, documents.lengths, max_length)
        strides = np.maximum(1, sizes - np.minimum(_WINDOW_OVERLAP, sizes // 4))
        # Without room for the document, because the query takes it all, one window is as good as many.
        counts = np.where(sizes > 0, 1 + -(-np.maximum(0, documents.lengths - sizes) // strides), 1)
        return np.stack([counts, strides], axis=1)

    def are_whole(self, pairs: Sequence[Pair], max_length: int) -> NDArray[np.bool_]:
        """For each pair, whether neither of its texts is cut: bool [N]."""
        queries, documents = self._contents(pairs, UNLIMITED)
        kept = self.pair_format.fit(queries.lengths, documents.lengths, max_length)
        whole: NDArray[np.bool_] = (kept[0] == queries.lengths) & (kept[1] == documents.lengths)
        return whole

    def inputs(self, tokens: BatchTokens, max_length: int) -> EncoderInputs:
        """The M pairs of a batch: each document with the query of its row."""
        num_rows = len(tokens.num_documents)
        rows = np.repeat(np.arange(num_rows), tokens.num_documents)
        documents = num_rows + np.arange(len(rows))
        kept = self.pair_format.fit(tokens.lengths[rows], tokens.lengths[documents], max_length)

        def selected(inputs: NDArray[np.int64]) -> Tokens:
            texts = tokens.tokens(rows[inputs]), tokens.tokens(documents[inputs])
            return self.join(*texts, max_length)

        lengths = kept[0] + kept[1] + self.pair_format.num_special
        return EncoderInputs(
            num_queries=0,
            rows=rows,
            lengths=lengths,
            costs=lengths,
            sizes=(None,),
            tokens=selected,
            further=self.further(lengths, selected),
        )

    def query_prompt(self, prompt: Prompt) -> Prompt:
        """The text around a query: its prompt and that of the pair format."""
        return self.pair_format.query.around(prompt)

    def document_prompt(self, prompt: Prompt) -> Prompt:
        """The text around a document."""
        return self.pair_format.document.around(prompt)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and lengths."""
        around = (self.pair_format.query, self.pair_format.document)
        texts = [(prompt.prefix, prompt.suffix) for prompt in around]
        return ("without special tokens", *(texts if any(map(any, texts)) else []))

    def _contents(self, pairs: Sequence[Pair], limit: int) -> tuple[Tokens, Tokens]:
        """The tokens of the queries and of the documents, without special tokens; those of equal texts once."""
        texts = [(self.pair_format.query(pair.query), self.pair_format.document(pair.document)) for pair in pairs]
        numbers = {text: n for n, text in enumerate(dict.fromkeys(itertools.chain.from_iterable(texts)))}
        tokens = self.tokenize(list(numbers), limit)
        queries, documents = (np.array([numbers[pair[n]] for pair in texts], dtype=np.int64) for n in range(2))
        return tokens.take(queries), tokens.take(documents)


def read_pair_format(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> PairFormat:
    """The format in which a cross-encoder reads pairs.

    A ConfigError if an encoder has a template, or a new head is trained on pairs with nothing between their texts; a
    ModelError if the tokenizer's pairs are not its texts and special tokens around them.
    """
    types = int(getattr(source.config.get_text_config(), "type_vocab_size", 0) or 0) > 1
    head: HeadSource = source.settings
    if head.template is not None:
        if head.vision is None and not is_decoder(source.config):
            raise ConfigError(
                f"{model_option('pair_template')}={head.template}: is for decoders; {source.config.model_type} is an "
                "encoder, "
                "whose pairs have special tokens between their texts; leave it out"
            )
        return template_format(head.template, tokenizer)
    pair_format = PairFormat.of(tokenizer, token_types=types)
    needs_template = (head.is_new or bool(head.tokens)) and is_decoder(source.config)
    if needs_template and not pair_format.between:
        raise ConfigError(
            f"{model_option('pair_template')}=null: the tokenizer puts nothing between the two texts of a pair; set "
            'model.pair_template, such as {query: "Query: {query}\\n", document: "Document: {document}\\n"}'
        )
    return pair_format


def template_format(template: PairTemplate, tokenizer: PreTrainedTokenizerBase) -> PairFormat:
    """The pair format of a template: its end survives truncation, and only the document is cut."""
    special = PairFormat.of(tokenizer) if template.special_tokens else None
    before, after = (special.before, special.after) if special is not None else ((), ())
    if template.bos and tokenizer.bos_token_id is not None and tokenizer.bos_token_id != tokenizer.pad_token_id:
        before = (int(tokenizer.bos_token_id),)
    tokens = FastTokenizer(tokenizer, special_tokens=False)

    def ids(texts: Sequence[str]) -> tuple[int, ...]:
        return tuple(token for part in tokens.ids(list(texts), _MAX_TEMPLATE) for token in part) if texts else ()

    return PairFormat(
        before=before + ids(template.prefix),
        between=ids(template.between),
        after=ids(template.suffix) + after,
        truncation=PairTruncation.only_second,
        max_query_fraction=template.max_query_fraction,
        from_left=tokenizer.truncation_side == "left",
        query=Prompt(*template.query),
        document=Prompt(*template.document),
    )


class ScoreHead(ClassHead):
    """Scores of pairs: raw logits, before the sigmoid that turns them into probabilities.

    The head computes in float32 whatever the precision of the backbone: in bf16 most of the best candidates of a query
    would have the same score.

    Args:
        pooling: which hidden state of a pair the class receives.
    """

    dimension = 1
    reads_pairs = True

    def __init__(self, model: PreTrainedModel, pooling: Pooling) -> None:
        super().__init__(model)
        self.in_float32, self.pooling = model, pooling

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The scores of pairs, [N, 1]."""
        vectors = self.compared(hidden, chunk)
        vectors = vectors.to(next(self.model.parameters()).dtype)  # float32, except where memory is estimated
        return (self.logits(vectors[:, None]).float(),)

    def compared(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        """The pooled vectors [N, H], because scores near 0 have no relative difference."""
        hidden = hidden if chunk.packing is None else hidden[0]
        return POOLING[self.pooling].pool(hidden, PooledTokens.of(chunk))

    def of_whole_class(self, chunk: Chunk, backbone: nn.Module) -> Tensor:
        """The scores of padded pairs, with the class' own selection of a token."""
        return self.whole_logits(chunk, backbone)

    def difference(self, actual: Tensor, expected: Tensor) -> str | None:
        """Why scores are not those of the whole class; None if they are."""
        if actual.shape != expected.shape or actual.shape[1] != 1:
            return f"it returns {tuple(expected.shape)[1:]} numbers for a pair"
        difference = float(((actual - expected).abs() / expected.abs().clamp(min=1.0)).max())
        return None if difference <= _TOLERANCE else f"scores differ by {difference:.2g} from those of its own forward"

    @property
    def beside_adapters(self) -> dict[str, nn.Module]:
        """The class, as PEFT trains it for sequence classification."""
        return {HEAD.rstrip("."): self.model}

    @property
    def peft_modules(self) -> list[str]:
        """The parts of the class with weights."""
        named = {name: part for name, part in self.model.named_children() if not isinstance(part, StandIn)}
        pooler = stand_in_of(self.model).pooler
        named |= {} if pooler is None else {f"{self.model.base_model_prefix}.pooler": pooler}
        return [name for name, part in named.items() if next(part.parameters(), None) is not None]


def cross_encoder(classifier: PreTrainedModel, pooling: Pooling | str) -> Encoder:
    """The encoder of a sequence classifier, which becomes its head with a stand-in for the backbone."""
    backbone, name = classifier.base_model, classifier.base_model_prefix
    assert isinstance(backbone, PreTrainedModel)
    assert isinstance(pooling, Pooling)
    pooler, activation = getattr(backbone, "pooler", None), getattr(backbone, "pooler_activation", None)
    setattr(classifier, name, StandIn(pooler if isinstance(pooler, nn.Module) else None, activation))
    # A configuration of its own: decoders' classes reject several rows without a padding token.
    classifier.config = copy.deepcopy(classifier.config)
    config = classifier.config.get_text_config()
    config.pad_token_id = 0 if config.pad_token_id is None else config.pad_token_id
    return Encoder(prepare_backbone(backbone), ScoreHead(classifier, pooling))


def read_weights(source: ModelSource) -> tuple[dict[str, Tensor], set[str]]:
    """The weights that a source's files have, by the encoder's names, and the names of those that they lack.

    A new head is in neither.
    """
    head: HeadSource = source.settings
    if head.tokens:
        model = _causal_model(source)
        rows = [model.get_output_embeddings().weight.detach()[token] for token in head.tokens]
        backbone = prepare_backbone(model.base_model).state_dict()
        return {f"backbone.{name}": weight for name, weight in backbone.items()} | {SCORE: _score_of(rows)}, set()
    config = source.config
    if head.labels:
        config = copy.deepcopy(config)
        config.num_labels = head.num_labels
    model, missing_keys = read_model(source, AutoModelForSequenceClassification, config)
    encoder = cross_encoder(model, source.vectors.pooling)
    weights = _weights_of_labels(encoder, source, head) if head.labels else dict(encoder.state_dict())
    missing = {name for name in weights if own_name(name, model.base_model_prefix) in missing_keys}
    if head.linear is not None:
        location = linear_location(head.linear)
        with safe_open(location.path, framework="pt") as file:
            weights[SCORE] = file.get_tensor(location.key)
        missing -= {SCORE}
    new = {name for name in missing if head.is_new and name.startswith(HEAD)}
    return {name: weight for name, weight in weights.items() if name not in new}, missing - new


def _weights_of_labels(encoder: Encoder, source: ModelSource, head: HeadSource) -> dict[str, Tensor]:
    """The weights of the class of one label whose score is that of the labels of `encoder`.

    Its last layer is the rows of the labels. A ModelError if scores of random vectors differ, as in a class of other
    layers.
    """
    single = build_encoder(source).eval()
    shapes = {name: tensor.shape for name, tensor in single.state_dict().items()}
    weights = {
        name: _score_of([weight[label] for label in head.labels])
        if weight.shape != shapes.get(name) and weight.shape[:1] == (head.num_labels,)
        else weight
        for name, weight in encoder.state_dict().items()
    }
    vectors = torch.randn(4, 1, hidden_size(source.config), generator=torch.Generator().manual_seed(0))
    chunk = Chunk(torch.zeros((4, 1), dtype=torch.int64), torch.ones((4, 1), dtype=torch.int64), has_padding=False)
    try:
        single.load_state_dict(weights, assign=True)
        with torch.no_grad():
            scores = single.output(vectors, chunk)[0]
            logits = encoder.eval().output(vectors, chunk)[0]
    except RuntimeError as error:
        raise ModelError(f"{source.directory}: {model_option('score_labels')}: {one_line(error)}") from None
    expected = _score_of([logits[:, label] for label in head.labels]).T
    if not torch.allclose(scores, expected, rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"{source.directory}: {model_option('score_labels')}={written(list(head.labels))}: the scores of "
            f"{source.config.model_type} for a single label are computed in another way than its logits of several"
        )
    return weights


def locate_head(
    source: ModelSource, shapes: Mapping[str, torch.Size], stored: Mapping[str, TensorLocation]
) -> tuple[dict[str, TensorLocation], set[str]]:
    """Where the weights of the head are, by the encoder's names, and the names of those that `score_weights` reads."""
    head: HeadSource = source.settings
    locations = located_in_class(shapes, stored)
    if head.linear is not None:
        locations[SCORE] = linear_location(head.linear)
    return locations, {SCORE} if head.tokens else set()


def linear_location(directory: Path) -> TensorLocation:
    """The weight of the Dense module that is the head of a cross-encoder."""
    stored = stored_tensors(directory)
    if "linear.weight" not in stored:
        raise ModelError(f"{directory / 'model.safetensors'} has no linear.weight: this head would be random")
    return stored["linear.weight"]


def _causal_model(source: ModelSource) -> PreTrainedModel:
    """The language model in a source's directory; a ModelError if it has no vocabulary head that scores need."""
    model_class = AutoModelForCausalLM if source.settings.vision is None else AutoModelForImageTextToText
    model, missing = read_model(source, model_class, None)
    vocabulary = model.get_output_embeddings()
    if vocabulary is None or getattr(vocabulary, "bias", None) is not None:
        raise ModelError(
            f"{source.directory}: {type(model).__name__} has no vocabulary head without a bias, which scores need"
        )
    for name in sorted(missing):
        raise ModelError(
            f"{source.directory} lacks weights of {type(model).__name__}, such as {name}: they would be random"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def vocabulary_head(source: ModelSource) -> Tensor:
    """The vocabulary head [V, H] in float32, of a model whose score is that of tokens."""
    assert source.directory is not None
    stored = stored_tensors(source.directory)
    if not stored:
        weight: Tensor = _causal_model(source).get_output_embeddings().weight.detach()
        return weight
    key = _vocabulary_key(source, stored)
    with safe_open(stored[key].path, framework="pt") as file:
        head: Tensor = file.get_tensor(key)
    return head.float()


def vocabulary_rows(source: ModelSource) -> Iterator[tuple[int, Tensor]]:
    """The rows of `vocabulary_head` as they are stored, each part with the number of its first row."""
    stored = stored_tensors(source.directory) if source.directory is not None else {}
    if not stored:
        yield 0, vocabulary_head(source)
        return
    key = _vocabulary_key(source, stored)
    with safe_open(stored[key].path, framework="pt") as file:
        rows = file.get_slice(key)
        for first in range(0, rows.get_shape()[0], _ROWS_READ):
            yield first, rows[first : first + _ROWS_READ]


def score_weights(source: ModelSource) -> dict[str, Tensor]:
    """The weight [1, H] of the head that starts from tokens, by the encoder's name; nothing for other heads.

    Only the rows of these tokens are read, from safetensors. A ModelError if the directory has no vocabulary head.
    """
    if not source.settings.tokens or source.directory is None:
        return {}
    stored = stored_tensors(source.directory)
    key = _vocabulary_key(source, stored)
    with safe_open(stored[key].path, framework="pt") as file:
        rows = [file.get_slice(key)[token : token + 1][0] for token in source.settings.tokens]
    return {SCORE: _score_of(rows)}


def _vocabulary_key(source: ModelSource, stored: Mapping[str, TensorLocation]) -> str:
    """The name of the vocabulary head in the files, of the embedding table if both are tied; ModelError without one."""
    keys = [key for key in (VOCABULARY_HEAD,) if key in stored]
    if getattr(source.config.get_text_config(), "tie_word_embeddings", False):
        keys = [key for key in stored if f".{key}".endswith(f".{_EMBEDDINGS}")]
    if len(keys) != 1 or keys[0].replace(".weight", ".bias") in stored:
        raise ModelError(
            f"{source.directory} has no vocabulary head without a bias ({VOCABULARY_HEAD}), whose rows the score of "
            "tokens starts from; set model.score_head=classification to train a new head"
        )
    return keys[0]


def _score_of(rows: list[Tensor]) -> Tensor:
    """The first row, minus the second if there is one, [1, ...]."""
    return (rows[0].float() - sum(row.float() for row in rows[1:]))[None]
