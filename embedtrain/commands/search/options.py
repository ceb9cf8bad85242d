"""Options of `python -m embedtrain search`."""

from dataclasses import dataclass
from typing import Any

from embedtrain.config.arguments import quote_value
from embedtrain.config.command_options import (
    ChunkOptions,
    IndexOptions,
    KindOptions,
    ModelOptions,
    PrecisionOptions,
    RerankOptions,
    SimilarityOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.compressed import parse_vector_format
from embedtrain.config.evaluation import check_index
from embedtrain.config.m3 import check_hybrid_weights
from embedtrain.config.reranker import parse_reranker
from embedtrain.config.validation import OptionChecks, require_single_process

HELP = """embedtrain search: find texts with a model

  embedtrain search model=DIR corpus=PATH query="what you look for"
  embedtrain search model=DIR reranker=DIR corpus=PATH query="..."

{options: model! corpus! query top_k vectors reranker rerank_depth precision vectors_dir trust_remote_code}"""


@dataclass(kw_only=True)
class SearchOptions(
    ModelOptions, KindOptions, SimilarityOptions, RerankOptions, IndexOptions, ChunkOptions, PrecisionOptions
):
    """Options of `python -m embedtrain search`."""

    corpus: str = ""  # BEIR folder, file of documents, or training rows, whose documents are searched
    query: str | None = None  # default: queries are read from the keyboard, or line by line from a pipe
    top_k: int = 5  # results per query
    # Search compressed vectors: int8, uint8, binary, or options of VectorFormat as in evaluation.vectors, such as
    # {documents: binary, rescore: {times: 4}}. The printed scores are those of the float vectors.
    vectors: Any = None


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
