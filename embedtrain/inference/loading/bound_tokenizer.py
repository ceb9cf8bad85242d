"""The tokenizer of a model with its maximal lengths, for what the model encodes: texts, pairs, or only documents."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from embedtrain.config.pair_template import PairTemplate
from embedtrain.data.m3 import M3Tokenizer
from embedtrain.data.pairs import PairFormat, PairTokenizer, PairTruncation
from embedtrain.data.static_queries import StaticQueryTokenizer
from embedtrain.data.text_format import Prompt
from embedtrain.data.token_rows import TokenRowTokenizer
from embedtrain.data.tokens import FastTokenizer, StaticTokenizer, TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.attention_direction import is_decoder
from embedtrain.models.static_embedding import is_static
from embedtrain.models.static_queries import StaticQueries
from embedtrain.models.tokenizer import check_vocabulary, resolve_max_length
from embedtrain.models.tokenizer_files import read_tokenizer
from embedtrain.models.types import ModelSource

_PROBES = ("What is the capital of France?", "  UPPER case,\ttwo\n\nlines, 1234 + 5678", "naïve café, 東京タワー")
_MAX_TEMPLATE = 100_000  # tokens


def bound_tokenizer(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    """The tokenizer of texts, or of pairs for a cross-encoder, with the maximal lengths of the model."""
    check_vocabulary(source, tokenizer)
    max_length = resolve_max_length(source, tokenizer)
    if source.kind.name == "late_interaction":
        return TokenRowTokenizer(tokenizer, max_length, source.settings)
    if source.kind.name == "m3":
        return M3Tokenizer(tokenizer, max_length)
    if source.kind.name == "sparse" and source.settings.queries is not None:
        return _static_query_tokenizer(source.settings.queries, source.dimension, tokenizer, max_length)
    if is_static(source.config):
        return StaticTokenizer(tokenizer, max_length)
    if source.kind.name != "cross_encoder":
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


def read_pair_format(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> PairFormat:
    """The format in which a cross-encoder reads pairs.

    A ConfigError if an encoder has a template, or a new head is trained on pairs with nothing between their texts; a
    ModelError if the tokenizer's pairs are not its texts and special tokens around them.
    """
    types = int(getattr(source.config.get_text_config(), "type_vocab_size", 0) or 0) > 1
    head = source.settings if source.kind.name == "cross_encoder" else None
    if head is not None and head.template is not None:
        if not is_decoder(source.config):
            raise ConfigError(
                f"model.pair_template={head.template}: is for decoders; {source.config.model_type} is an encoder, "
                "whose pairs have special tokens between their texts; leave it out"
            )
        return template_format(head.template, tokenizer)
    pair_format = PairFormat.of(tokenizer, token_types=types)
    needs_template = head is not None and (head.is_new or bool(head.tokens)) and is_decoder(source.config)
    if needs_template and not pair_format.between:
        raise ConfigError(
            "model.pair_template=null: the tokenizer puts nothing between the two texts of a pair; set "
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
