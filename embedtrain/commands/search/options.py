"""Options of `python -m embedtrain search`."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.arguments import quote_value
from embedtrain.config.code import code_option
from embedtrain.config.compose import compose_command
from embedtrain.config.compressed import parse_vector_format
from embedtrain.config.evaluation import IndexConfig, check_index
from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.m3 import check_hybrid_weights
from embedtrain.config.recipe import Precision
from embedtrain.config.reranker import parse_reranker
from embedtrain.config.validation import OptionChecks, require_single_process

HELP = """embedtrain search: find texts with a model

  embedtrain search model=DIR corpus=PATH query="what you look for"
  embedtrain search model=DIR reranker=DIR corpus=PATH query="..."

{options: model! corpus! query top_k vectors reranker rerank_depth precision vectors_dir trust_remote_code}"""


@dataclass(kw_only=True)
class SearchOptions:
    """Options of `python -m embedtrain search`."""

    model: str = ""  # model directory or Hub id
    corpus: str = ""  # BEIR folder, file of documents, or training rows, whose documents are searched
    query: str | None = None  # default: queries are read from the keyboard, or line by line from a pipe
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    # Weights of the dense, lexical and multi-vector scores of a model of three representations (BGE-M3) in their sum;
    # default: the model's.
    hybrid_weights: list[float] | None = None
    # How vectors are compared: cosine, dot, euclidean or manhattan; default: the model's setting.
    similarity: VectorSimilarity | None = None
    top_k: int = 5  # results per query
    # Search compressed vectors: int8, uint8, binary, or options of VectorFormat as in evaluation.vectors, such as
    # {documents: binary, rescore: {times: 4}}. The printed scores are those of the float vectors.
    vectors: Any = None
    # A cross-encoder or late-interaction model that orders the first documents again: options of RerankerConfig, or its
    # path. Scores are its own.
    reranker: Any = None
    rerank_depth: int = 100  # documents for the reranker
    precision: Precision = Precision.fp32
    chunk_tokens: int = 16384  # per forward pass, including padding
    index: IndexConfig = field(default_factory=IndexConfig)
    vectors_dir: str | None = None  # store document vectors there, so that the next search does not encode them again
    # Execute Python code of the model: only for authors you trust
    trust_remote_code: bool = code_option(False, "model", "revision", "reranker")


def compose(arguments: list[str]) -> SearchOptions:
    """The options, checked."""
    require_single_process("search")
    # A question has commas and apostrophes.
    options = compose_command("search", SearchOptions, [quote_value(argument, "query") for argument in arguments], HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.require(
        bool(options.corpus), "corpus", "is missing; write a BEIR directory, or a file of documents or training rows"
    )
    check.at_least(1, "chunk_tokens")
    check.at_least(1, "top_k")
    check_index(options.index, "index.", stores_vectors=options.vectors_dir is not None)
    check_hybrid_weights(options.hybrid_weights, check)
    check.at_least(1, "rerank_depth")
    if options.vectors is not None:
        options.vectors = parse_vector_format(options.vectors, "vectors")
    options.reranker = parse_reranker(options.reranker, "reranker")
    if options.reranker is None:
        message = "has no effect without a reranker; write reranker=DIR"
        check.require(options.rerank_depth == SearchOptions.rerank_depth, "rerank_depth", message)
    elif options.rerank_depth < options.top_k:
        check.require(False, "rerank_depth", f"must be at least top_k={options.top_k}, which are shown of them")
    return options
