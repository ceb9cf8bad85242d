"""How a cross-encoder reads a pair: the pair format of its tokenizer, or a template, checked against the model."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from embedtrain.config.pair_template import PairTemplate
from embedtrain.data.fast_tokenizer import FastTokenizer
from embedtrain.data.pair_format import PairFormat, PairTruncation
from embedtrain.data.text_format import Prompt
from embedtrain.errors import ConfigError
from embedtrain.models.attention_direction import is_decoder
from embedtrain.models.types import ModelSource

_MAX_TEMPLATE = 100_000  # tokens


def read_pair_format(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> PairFormat:
    """The format in which a cross-encoder reads pairs.

    A ConfigError if an encoder has a template, or a new head is trained on pairs with nothing between their texts; a
    ModelError if the tokenizer's pairs are not its texts and special tokens around them.
    """
    types = int(getattr(source.config.get_text_config(), "type_vocab_size", 0) or 0) > 1
    head = source.head
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
