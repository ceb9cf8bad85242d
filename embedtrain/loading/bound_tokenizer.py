"""The tokenizer of a model with its maximal lengths, for what the model encodes: texts, pairs, or only documents."""

from transformers import PreTrainedTokenizerBase

from embedtrain.data.m3 import M3Tokenizer
from embedtrain.data.pairs import PairTokenizer
from embedtrain.data.static_queries import StaticQueryTokenizer
from embedtrain.data.token_rows import TokenRowTokenizer
from embedtrain.data.tokens import StaticTokenizer, TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.errors import ConfigError, ModelError
from embedtrain.loading.pair_format import read_pair_format
from embedtrain.models.static_embedding import is_static
from embedtrain.models.static_queries import StaticQueries
from embedtrain.models.tokenizer import check_vocabulary, resolve_max_length
from embedtrain.models.tokenizer_files import read_tokenizer
from embedtrain.models.types import ModelSource

_PROBES = ("What is the capital of France?", "  UPPER case,\ttwo\n\nlines, 1234 + 5678", "naïve café, 東京タワー")


def bound_tokenizer(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    """The tokenizer of texts, or of pairs for a cross-encoder, with the maximal lengths of the model."""
    check_vocabulary(source, tokenizer)
    max_length = resolve_max_length(source, tokenizer)
    if source.token_vectors is not None:
        return TokenRowTokenizer(tokenizer, max_length, source.token_vectors)
    if source.m3 is not None:
        return M3Tokenizer(tokenizer, max_length)
    if source.words is not None and source.words.queries is not None:
        return _static_query_tokenizer(source.words.queries, source.dimension, tokenizer, max_length)
    if is_static(source.config):
        return StaticTokenizer(tokenizer, max_length)
    if source.head is None:
        return TextTokenizer(tokenizer, max_length, include_prompt=source.include_prompt)
    return PairTokenizer(tokenizer, max_length, read_pair_format(source, tokenizer))


def _static_query_tokenizer(
    queries: StaticQueries, num_words: int, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> StaticQueryTokenizer:
    """A ConfigError if sentence-transformers could not open the model, a ModelError if queries have other tokens."""
    if len(tokenizer.get_vocab()) != num_words:
        raise ConfigError(
            f"model.sparse.queries=static: the tokenizer has {len(tokenizer.get_vocab()):,} tokens and the model "
            f"weights of {num_words:,} words, which sentence-transformers cannot compare; write encoded"
        )
    bound = StaticQueryTokenizer(tokenizer, max_length)
    if queries.path is not None and (queries.path.parent / "tokenizer_config.json").is_file():
        own = read_tokenizer(queries.path.parent, trust_remote_code=False)
        stored = StaticQueryTokenizer(own, max_length).ids(_PROBES, role=TextRole.query)
        if own.get_vocab() != tokenizer.get_vocab() or stored != bound.ids(_PROBES, role=TextRole.query):
            raise ModelError(
                f"{queries.path.parent} has another tokenizer than the model's documents, which is not supported"
            )
    return bound
