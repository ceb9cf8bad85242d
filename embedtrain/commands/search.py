"""`python -m embedtrain search model=DIR corpus=DIR query="..."`: find texts with a model."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from embedtrain.config.command_line import quote_value
from embedtrain.config.command_options import (
    ChunkOptions,
    CorpusOptions,
    IndexOptions,
    KindOptions,
    ModelOptions,
    PoolingOptions,
    PrecisionOptions,
    RerankOptions,
    SimilarityOptions,
    check_no_reranker,
    parse_reranker,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.evaluation import VectorFormat, check_index
from embedtrain.config.kind_settings import check_hybrid_weights
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_corpus, parse_vector_format
from embedtrain.config.paths import require_models, require_sources
from embedtrain.config.validation import OptionChecks, require_single_process
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import decode_argument

if TYPE_CHECKING:
    from embedtrain.distributed.world import World
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.inference.index import Ranking, ShardedIndex
    from embedtrain.inference.loading.load import LoadedModel
    from embedtrain.inference.pair_scorer import PairScorer
    from embedtrain.inference.vector_cache import VectorCache
    from embedtrain.losses.encoded import Part
    from embedtrain.models.types import ModelSource
    from embedtrain.tracking.console import Console

HELP = """embedtrain search: find texts or pictures with a model

  embedtrain search model=DIR corpus=PATH query="what you look for"
  embedtrain search model=DIR corpus=PATH image=FILE
  embedtrain search model=DIR reranker=DIR corpus=PATH query="..."

{options: model! corpus! query image top_k vectors reranker rerank_depth precision vectors_dir trust_remote_code}"""


@dataclass(kw_only=True)
class SearchOptions(
    PrecisionOptions,
    ChunkOptions,
    IndexOptions,
    RerankOptions,
    SimilarityOptions,
    CorpusOptions,
    PoolingOptions,
    KindOptions,
    ModelOptions,
):
    """Options of `python -m embedtrain search`."""

    query: str | None = None  # default: queries are read from the keyboard, or line by line from a pipe
    # a file with a picture to search with, for models that read pictures; before the query
    image: str | None = option(None, is_input=True)
    top_k: int = option(5, at_least=1)  # results per query
    # Search compressed vectors: int8, uint8, binary, or options of VectorFormat as in evaluation.vectors, such as
    # {documents: binary, rescore: {times: 4}}. The printed scores are those of the float vectors.
    vectors: Any = option(None, items=VectorFormat)


def compose(arguments: list[str]) -> SearchOptions:
    """The options, checked."""
    require_single_process("search")
    # A question has commas and apostrophes.
    quoted = [quote_value(argument, "query", "image") for argument in arguments]
    options = compose_command("search", SearchOptions, quoted, HELP, _check_use)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.require(
        bool(options.corpus),
        "corpus",
        "is missing; write a BEIR directory, a file of documents or training rows, or a folder of pictures",
    )
    check.require(len(corpus := parse_corpus(options.corpus)) == 1, "corpus", "is several; one is searched")
    (options.corpus,) = corpus
    check_index(options.index, "index.", stores_vectors=options.vectors_dir is not None)
    check_hybrid_weights(options.hybrid_weights, check)
    if options.vectors is not None:
        options.vectors = parse_vector_format(options.vectors, "vectors")
    options.reranker = parse_reranker(options.reranker, "reranker")
    if options.reranker is not None and options.rerank_depth < options.top_k:
        check.require(False, "rerank_depth", f"must be at least top_k={options.top_k}, which are shown of them")
    return options


def _check_use(options: SearchOptions) -> None:
    if options.reranker is None:
        check_no_reranker(options, "rerank_depth")


_MAX_QUERY = 100_000  # characters; more is not text that somebody wrote, such as /dev/zero


def require_paths(options: SearchOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model, reranker=options.reranker and options.reranker.path)
    path = str(expand_user(options.corpus.path).absolute())  # it cannot be an id on the Hub
    require_sources((), [replace(options.corpus, path=path)])
    if options.image is not None and not expand_user(options.image).is_file():
        raise ConfigError(f"image={options.image}: there is no such file")


class Hit(NamedTuple):
    """A document that a query finds."""

    score: float
    id: str
    text: str  # of a picture, the reference to it


def run(options: SearchOptions) -> None:
    """Encode the corpus once, then answer one query, or one after another from the keyboard or a pipe."""
    image = _picture(options.image, options.corpus.max_image_pixels) if options.image is not None else ""
    for query, hits in answers(options, ([query] for query in _queries(options.query, image)), has_image=bool(image)):
        print_results(query, hits)


def answers(
    options: SearchOptions, batches: Iterable[Sequence[str]], *, has_image: bool = False
) -> Iterator[tuple[str, list[Hit]]]:
    """Encode the corpus once, then find the best documents of each query, a batch of queries at a time.

    `has_image` says that a query has a picture, for which the model has to read them.
    """
    from embedtrain.distributed.world import joined_world
    from embedtrain.evaluation.readers.retrieval import read_any_corpus
    from embedtrain.formats.source import CommandModel
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.inference.index import ShardedIndex, trec_order
    from embedtrain.inference.loading.command_model import load_encoder_model, open_reranker
    from embedtrain.inference.pair_scorer import best_first
    from embedtrain.tracking.console import Console

    corpus = read_any_corpus(expand_user(options.corpus.path), pictures=options.corpus)
    ids, texts = corpus.ids, corpus.texts
    console = Console()
    with joined_world() as world:
        reranker = open_reranker(options.reranker, world, trust_remote_code=options.trust_remote_code)
        config = CommandModel(
            path=options.model,
            kind=options.kind or "",
            pooling=options.pooling,
            revision=options.revision,
            similarity=options.similarity,
            hybrid_weights=options.hybrid_weights,
            trust_remote_code=options.trust_remote_code,
        )
        with console.phase("loading the model"):
            model = load_encoder_model(config, options.precision, world)
        _check_vectors(options, model.source)
        if has_image and not model.tokenizer.layout.reads_pictures:
            raise ConfigError(f"image={options.image}: the model {options.model} reads texts alone; write query=TEXT")
        encoder = SentenceEncoder.from_model(model, world, chunk_tokens=options.chunk_tokens)
        scorer = _load_scorer(options, reranker, world, console)
        index = ShardedIndex(trec_order(ids), world, options.index, encoder.score)
        vector_cache = _open_cache(options, model, world)
        noun = "documents" if model.tokenizer.layout.reads_pictures else "texts"
        with console.phase(f"encoding {len(texts):,} {noun}"):
            index.add_texts(encoder, texts, encoder.document_prompt, vector_cache=vector_cache)
        search = _searching(options, model, encoder, index, console)
        for queries in batches:
            encoded = encoder.encode(list(queries), encoder.query_prompt)
            found = search(encoded, options.top_k if scorer is None else options.rerank_depth)
            for query, numbers, scores in zip(queries, found.documents.tolist(), found.scores.tolist(), strict=True):
                best = list(zip(scores, numbers, strict=True))
                if isinstance(scorer, SentenceEncoder):
                    ranking = _rerank(scorer, query, [ids[n] for n in numbers], [texts[n] for n in numbers])
                    order = ranking.documents[0].tolist()
                    best = [(score, numbers[i]) for score, i in zip(ranking.scores[0].tolist(), order, strict=True)]
                elif scorer is not None:
                    of_pairs = scorer.score([query] * len(numbers), [texts[number] for number in numbers]).tolist()
                    order = best_first(of_pairs, [ids[number] for number in numbers])
                    best = [(of_pairs[i], numbers[i]) for i in order]
                yield query, [Hit(score, ids[number], texts[number]) for score, number in best[: options.top_k]]


def _picture(path: str, max_pixels: int) -> str:
    """The item of a picture in a file of the user."""
    from embedtrain.data.images.files import PICTURES, BadPicture, Place, read_picture

    place = Place(str(expand_user(path).absolute()))
    try:
        picture = read_picture(place, max_pixels=max_pixels)
    except BadPicture as bad:
        raise DataError(f"image={path}: {bad}") from None
    PICTURES.add(picture, place)
    return str(picture)


def _open_cache(options: SearchOptions, model: "LoadedModel", world: "World") -> "VectorCache | None":
    """The stored vectors of documents, if the user wants them."""
    from embedtrain.distributed.sharding import resolve_precision
    from embedtrain.inference.vector_cache import VectorCache, model_identity

    if options.vectors_dir is None:
        return None
    identity = model_identity(model.source, resolve_precision(options.precision, world), world)
    return VectorCache(expand_user(options.vectors_dir), {**identity, "index": options.index.identity})


def _check_vectors(options: SearchOptions, source: "ModelSource") -> None:
    """A ConfigError for compressed vectors that the model does not have."""
    from embedtrain.config.evaluation import check_kind_of_vectors, dims_of

    if options.vectors is not None:
        check_kind_of_vectors(source.kind, "vectors")
        source.require_inner_products("vectors")
        source.require_dimensions(dims_of([options.vectors]), "vectors", truncated=True)


def _searching(
    options: SearchOptions, model: "LoadedModel", encoder: "SentenceEncoder", index: "ShardedIndex", console: "Console"
) -> "Callable[[Part, int], Ranking]":
    """What finds the best documents for encoded queries, in the form of `vectors` if there is one."""
    from embedtrain.evaluation.types import CompressedVectors
    from embedtrain.inference.index import Ranking
    from embedtrain.inference.quantised import read_ranges
    from embedtrain.utils.formatting import format_count

    def scored(queries: "Part") -> "Part":
        return encoder.score.search_part(queries)

    form = options.vectors
    if form is None:
        return lambda queries, k: index.search(scored(queries), k)
    dimension = min(model.source.dimension, encoder.truncate_dim or model.source.dimension)
    forms = CompressedVectors([form], ranges=read_ranges(model.source.directory))
    compressed = forms.index(index, form, dimension, {})
    bytes_each = format_count(form.bytes_per_document(dimension), "byte")
    console.note(f"vectors: {form.label}, {bytes_each} of a document instead of {4 * dimension:,}")

    def search(queries: "Part", k: int) -> "Ranking":
        documents = compressed.search(queries.values, k).documents
        return Ranking(index.scores_of(scored(queries), documents), documents)

    return search


def _load_scorer(
    options: SearchOptions, source: "ModelSource | None", world: "World", console: "Console"
) -> "PairScorer | SentenceEncoder | None":
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.inference.loading.command_model import load_reranker
    from embedtrain.inference.pair_scorer import PairScorer

    if source is None:
        return None
    with console.phase("loading the reranker"):
        model = load_reranker(source, options.reranker, options.precision, world)
    if not source.kind.scores_pairs:
        return SentenceEncoder.from_model(model, world, chunk_tokens=options.chunk_tokens)
    windows = options.reranker.document_windows
    return PairScorer.from_model(model, world, chunk_tokens=options.chunk_tokens, windows=windows)


def _rerank(encoder: "SentenceEncoder", query: str, ids: Sequence[str], texts: Sequence[str]) -> "Ranking":
    """These documents in the order of a model that encodes texts."""
    from embedtrain.inference.index import ShardedIndex, trec_order

    index = ShardedIndex(trec_order(ids), encoder.world, score=encoder.score)
    index.add_texts(encoder, texts, encoder.document_prompt)
    return index.search(encoder.score.search_part(encoder.encode([query], encoder.query_prompt)), len(ids))


def _queries(query: str | None, image: str) -> Iterator[str]:
    from embedtrain.data.images.item import plain

    if query is not None or image:
        yield image + plain(decode_argument(query or ""))
        return
    while True:
        if sys.stdin.isatty():
            print("query (empty to end): ", end="", flush=True)
        try:
            line = sys.stdin.readline(_MAX_QUERY + 1)
        except OSError as error:
            raise DataError(f"standard input cannot be read: {error.strerror or error}") from None
        if len(line) > _MAX_QUERY:
            raise DataError(f"a query on standard input has more than {_MAX_QUERY:,} characters: write one per line")
        line = line.strip()
        if not line:
            return
        yield plain(line)


def print_results(query: str, results: Sequence[Hit]) -> None:
    """Print one line per result (score, id, text), with the names of the files of pictures."""
    from rich.table import Table
    from rich.text import Text

    from embedtrain.data.sources.pictures import shown_item
    from embedtrain.tracking.pages import standard_output
    from embedtrain.utils.formatting import printable

    console = standard_output()
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(justify="right", style="cyan", no_wrap=True)
    table.add_column(style="bold", no_wrap=True, max_width=32, overflow="ellipsis")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for score, document_id, text in results:
        table.add_row(f"{score:.3f}", Text(printable(document_id)), Text(printable(" ".join(shown_item(text).split()))))
    console.print()
    console.print(Text(printable(shown_item(query)), style="bold"))
    console.print(table)
