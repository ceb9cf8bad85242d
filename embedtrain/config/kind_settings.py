"""Settings of models of single kinds, which options choose and files store.

Modules in `models/` and readers in `formats/`, which kinds are made of, need them as well.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from embedtrain.config.options import option
from embedtrain.config.validation import OptionChecks


class HeadActivation(str, Enum):
    """The function after a head's linear layer; `identity`: none."""

    identity = "identity"
    tanh = "tanh"
    gelu = "gelu"
    silu = "silu"


class HeadInit(str, Enum):
    """Initial weights of a head; a bias starts at 0.

    `identity`: the first rows of the identity matrix, so that heads without an activation whose last has as many
    outputs as the pooling leave the vectors as they were. `normal`: of mean 0 and standard deviation 1 / sqrt(inputs).
    """

    identity = "identity"
    normal = "normal"


@dataclass(kw_only=True)
class HeadConfig:
    """A new dense head, an element of `model.heads`."""

    out: int  # dimensions of its output; that of the last head is the dimension of the vectors
    bias: bool = False  # whether a trained vector is added
    activation: HeadActivation = HeadActivation.identity
    init: HeadInit = HeadInit.identity


class ScoreHead(str, Enum):
    """How a cross-encoder's score is computed from the last layer.

    `classification` is the head of transformers' class for sequence classification. `tokens` is the logit of a token
    after the pair, or the difference of two; the same head starts from their rows of the vocabulary. `auto` is `tokens`
    for a `LogitScore` directory of sentence-transformers, with `score_tokens`, and for a causal language model with a
    named `pair_template`.
    """

    auto = "auto"
    classification = "classification"
    tokens = "tokens"


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """A pair's tokens: prefix, query, between, document, suffix.

    Each text of `prefix`, `between` and `suffix` is tokenized on its own. What `query` and `document` put before and
    after a text, and its prompt, are tokenized with the text: Qwen's tokenizer joins a question mark and the line break
    after it. Only the document is cut, or a query that leaves no room for it.
    """

    prefix: tuple[str, ...] = ()
    query: tuple[str, str] = ("", "")
    between: tuple[str, ...] = ()
    document: tuple[str, str] = ("", "")
    suffix: tuple[str, ...] = ()
    special_tokens: bool = True  # whether the tokenizer's own special tokens begin and end the pair
    bos: bool = False  # whether its bos token begins the pair, if it has one; without `special_tokens`
    max_query_fraction: float = 1.0  # of the tokens besides those of prefix and suffix
    # Prompts of queries and documents; `{instruction}` in the format of the query's is the instruction of a row.
    prompts: Mapping[str, str] = field(default_factory=dict)
    instruction_format: str | None = None

    @property
    def wraps_texts(self) -> bool:
        """Whether text is tokenized together with queries or documents, besides prompts."""
        return any((*self.query, *self.document))


PLAIN_INSTRUCTION = "{instruction}{text}"  # of a chat template whose system message is the whole prompt
_CHAT_END = "<|im_end|>\n<|im_start|>assistant\n"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
# Qwen3-Reranker: its model card. bge-reranker-v2-gemma: FlagEmbedding 1.4, inference/reranker/decoder_only/base.py.
# mxbai-rerank-base-v2 and -large-v2: mxbai-rerank 0.1, mxbai_rerank_v2.py. Qwen3-VL-Reranker: its model's card.
PAIR_TEMPLATES = {
    "qwen3": PairTemplate(
        prefix=(_JUDGE,),
        query=("", "\n"),
        suffix=(f"{_CHAT_END}<think>\n\n</think>\n\n",),
        special_tokens=False,
        prompts={
            "query": "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            "<Query>: ",
            "document": "<Document>: ",
        },
        instruction_format="<Instruct>: {instruction}\n<Query>: {text}",
    ),
    "qwen3_vl": PairTemplate(
        prefix=(_JUDGE,),
        query=("", "\n"),
        suffix=(_CHAT_END,),
        special_tokens=False,
        prompts={
            "query": "<Instruct>: Given a search query, retrieve relevant candidates that answer the query.<Query>:",
            "document": "<Document>:",
        },
        instruction_format="<Instruct>: {instruction}<Query>:{text}",
    ),
    "gemma": PairTemplate(
        between=("\n",),
        suffix=(
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        special_tokens=False,
        bos=True,
        max_query_fraction=0.75,
        prompts={"query": "A: ", "document": "B: "},
    ),
    "mxbai": PairTemplate(
        prefix=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n",
        ),
        between=("\n",),
        suffix=(
            "\n",
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            _CHAT_END,
        ),
        special_tokens=False,
        max_query_fraction=0.75,
        prompts={"query": "query: ", "document": "document: "},
        instruction_format="instruction: {instruction}\nquery: {text}",
    ),
}
# The tokens whose logits are the score: that of the first, minus that of the second if there is one.
SCORE_TOKENS = {"qwen3": ("yes", "no"), "qwen3_vl": ("yes", "no"), "gemma": ("Yes",), "mxbai": ("1", "0")}
TEMPLATE_PARTS = ("prefix", "query", "document", "suffix")
_NAMES = {
    "qwen3": r"qwen3-reranker-",
    "qwen3_vl": r"qwen3-vl-reranker-",
    "gemma": r"bge-reranker-v2-gemma",
    "mxbai": r"mxbai-rerank-(base|large)-v2",
}


def pair_template(value: Any) -> PairTemplate | None:
    """The template of a valid `model.pair_template`: a name, a mapping, or None."""
    if value is None:
        return None
    if isinstance(value, str):
        return PAIR_TEMPLATES[value]
    (before_query, after_query), (before_document, after_document) = (
        value[name].split(f"{{{name}}}") for name in ("query", "document")
    )
    return PairTemplate(
        prefix=(value["prefix"],) if value.get("prefix") else (),
        query=(before_query, after_query),
        document=(before_document, after_document),
        suffix=(value["suffix"],) if value.get("suffix") else (),
    )


def published_template(path: str) -> str | None:
    """The name of the template of a published reranker, by its Hub id, a copy of its name, or the Hub's cache."""
    for part in re.split(r"[\\/]+|--", path.lower()):
        for name, pattern in _NAMES.items():
            if re.match(pattern, part):
                return name
    return None


def check_score_labels(labels: Sequence[int], check: OptionChecks, name: str) -> None:
    """Labels are one or two different ones."""
    check.require(
        len(labels) in (1, 2) and len(set(labels)) == len(labels) and min(labels) >= 0,
        name,
        "must be two different labels, such as [1,0] for the logit of label 1 minus that of label 0, or one for its "
        "logit alone",
    )


DEFAULT_DIMENSION, DEFAULT_EXPANSION_LENGTH = 128, 32
# Of the export format `adapter`.
NO_PROJECTION = (
    "PEFT's adapter format cannot hold the projection of model.kind=late_interaction, which is trained beside "
    "adapters; leave adapter out (the merged model has both)"
)


class QueryExpansion(str, Enum):
    """Which queries get further tokens, whose vectors are compared with documents as well (Khattab and Zaharia, 2020).

    `fixed` extends or cuts every query to `expansion_length` tokens, `min` extends shorter queries and keeps longer
    ones.
    """

    none = "none"
    min = "min"
    fixed = "fixed"


class TokenSimilarity(str, Enum):
    """The score of two texts: the sum over the tokens of the query of their largest similarity, or the mean."""

    maxsim = "maxsim"
    meanmaxsim = "meanmaxsim"


class PageLibrary(str, Enum):
    """The library whose classes a late-interaction model over pages is for.

    They put other texts around queries and pages, and transformers counts the positions of a page's tokens as those of
    a text, so that vectors of the same weights differ.
    """

    transformers = "transformers"
    colpali_engine = "colpali_engine"


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Further tokens at the end of a query."""

    strategy: QueryExpansion  # min or fixed
    length: int  # tokens of an expanded query
    token: str | None = None  # None: the mask token, or the end-of-text token of a tokenizer without one
    attend: bool = False  # whether other tokens attend to them, and they to each other


@dataclass(frozen=True, kw_only=True)
class TokenVectors:
    """The settings of a late-interaction model: those of its files, with the options of the recipe in their place."""

    query_length: int | None = None  # tokens of a query; None: the maximal length of the model
    document_length: int | None = None
    expansion: Expansion | None = None  # None: queries are not expanded
    skiplist_words: tuple[str, ...] = ()  # words whose tokens have no vector
    skiplist_queries: bool = False  # whether those of queries have none either
    similarity: TokenSimilarity = TokenSimilarity.maxsim
    is_new: bool = False  # whether the projection is not in the files and starts from the seed

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text; None if only the model limits those of a role."""
        expanded = 0 if self.expansion is None else self.expansion.length
        is_fixed = self.expansion is not None and self.expansion.strategy is QueryExpansion.fixed
        query_length = expanded if is_fixed else self.query_length
        if query_length is None or self.document_length is None:
            return None
        return max(query_length, expanded, self.document_length)

    def vectors_per_text(self, max_length: int) -> tuple[int, int]:
        """Vectors of a query and of a document, for texts of at most `max_length` tokens and without a skip list."""
        query = min(max_length, self.query_length or max_length)
        if self.expansion is not None:
            query = min(max_length, self.expansion.length)
        return query, min(max_length, self.document_length or max_length)


IDF = "idf"  # the value of model.query_weights for weights that are computed from the documents
_QUERY_WEIGHT = 5e-5


class SparsePooling(str, Enum):
    """The weight of a word in a text: the largest over the text's tokens, or the sum."""

    max = "max"
    sum = "sum"


class SparseActivation(str, Enum):
    """The weight of a word at a token with the logit x.

    `relu` is log(1 + max(x, 0)), as in all SPLADE models; `log1p_relu` is log(1 + log(1 + max(x, 0))), as in models of
    OpenSearch from version 3 on. The names are those of sentence-transformers.
    """

    relu = "relu"
    log1p_relu = "log1p_relu"


class SparseRegularizer(str, Enum):
    """What keeps vectors sparse. Every mean is over the texts of the global batch.

    `flops`: the sum over words of the squared mean weight (Paria et al., 2020), which also evens out how often words
    are used. `l1`: the mean over texts of the sum of weights.
    """

    flops = "flops"
    l1 = "l1"


class SparseQueries(str, Enum):
    """How queries become weights of words.

    `encoded`: by the model, as documents. `static`: each distinct token of a query has a weight of its own, the same in
    every query, so that queries need no inference; special tokens are left out (Geng et al., 2024).
    """

    encoded = "encoded"
    static = "static"


@dataclass(frozen=True, kw_only=True)
class StaticQueries:
    """Where the weights of tokens are, and whether they are trained."""

    path: Path | None  # safetensors or JSON; None: they are computed from the training data
    trained: bool = False


@dataclass(frozen=True, kw_only=True)
class WordWeights:
    """The settings of a sparse model: those of its files, with the options of the recipe in their stead."""

    pooling: SparsePooling = SparsePooling.max
    activation: SparseActivation = SparseActivation.relu
    queries: StaticQueries | None = None  # of queries that are not encoded

    @property
    def is_new(self) -> bool:
        """False: the vocabulary head is in the files."""
        return False

    @property
    def query_mode(self) -> SparseQueries:
        """How queries become weights of words."""
        return SparseQueries.encoded if self.queries is None else SparseQueries.static


@dataclass(kw_only=True)
class SparsityConfig:
    """The regularization of learned sparse models, which is added to the loss."""

    # Factor of the queries' regularizer; 0: none. Default: 5e-5, or 0 for static queries, which are sparse already.
    query_weight: float | None = option(None, at_least=0, hint="0 leaves the regularizer out")
    # factor of the documents' regularizer; 0: none
    document_weight: float = option(3e-5, at_least=0, hint="0 leaves the regularizer out")
    query_regularizer: SparseRegularizer = SparseRegularizer.flops
    document_regularizer: SparseRegularizer = SparseRegularizer.flops
    # Queries with at most so many active words are left out of flops (L0-masked FLOPS, Shen et al., 2025); null: none.
    query_threshold: int | None = option(None, at_least=0, hint="null regularizes all texts")
    # the same for documents
    document_threshold: int | None = option(None, at_least=0, hint="null regularizes all texts")
    # The weights grow quadratically from 0 over these first steps: below 1 a fraction of all steps, from 1 a number.
    ramp: float = option(0.33, at_least=0, hint="0 applies the full weights from the first step on")

    def resolved(self, queries: SparseQueries) -> "SparsityConfig":
        """The same with the default of `query_weight`."""
        default = 0.0 if queries is SparseQueries.static else _QUERY_WEIGHT
        return self if self.query_weight is not None else replace(self, query_weight=default)


class HybridWeights(NamedTuple):
    """The weights of the scores of the three representations in their sum, the score of two texts."""

    dense: float = 1.0
    lexical: float = 0.3
    multi_vector: float = 1.0


def check_hybrid_weights(weights: list[float] | None, check: OptionChecks) -> None:
    """Raise a ConfigError unless they are weights of the three scores."""
    check.require(
        weights is None
        or (
            len(weights) == len(HybridWeights._fields)
            and all(0 <= weight < math.inf for weight in weights)
            and any(weights)
        ),
        "hybrid_weights",
        f"must be the weights of the {', '.join(HybridWeights._fields)} scores, at least 0 and one above 0",
    )


@dataclass(frozen=True, kw_only=True)
class M3Settings:
    """What a model of this kind computes.

    The encoder returns a row per token of a text. The first token's row has the dense vector, that of each other token
    its vector; the last column is the token's lexical weight.
    """

    dimension: int  # of the dense vector
    token_dimension: int  # of a token's vector
    weights: HybridWeights
    is_new: bool = False  # whether the two linear layers are not in the files and start from the seed
