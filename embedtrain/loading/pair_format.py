"""How a cross-encoder reads a pair: the pair format of its tokenizer, checked against the model."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from embedtrain.data.pairs import PairFormat
from embedtrain.data.tokens import FastTokenizer
from embedtrain.errors import ConfigError
from embedtrain.models.attention_direction import is_decoder
from embedtrain.models.source import ModelSource

_MAX_TEMPLATE = 100_000  # tokens


def read_pair_format(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> PairFormat:
    """The format in which a cross-encoder reads pairs.

    A template is tokenised apart from the texts, and its end survives truncation.

    A ConfigError if an encoder has a template, or a new head is trained on pairs with nothing between their texts; a
    ModelError if the tokenizer's pairs are not its texts and special tokens around them.
    """
    types = int(getattr(source.config.get_text_config(), "type_vocab_size", 0) or 0) > 1
    pair_format = PairFormat.of(tokenizer, token_types=types)
    template = None if source.head is None else source.head.template
    if template is not None:
        if not is_decoder(source.config):
            raise ConfigError(
                f"model.pair_template={dict(template)}: is for decoders; {source.config.model_type} is an encoder, "
                "whose pairs have special tokens between their texts; leave it out"
            )
        (start, middle), (next_start, end) = (template[name].split(f"{{{name}}}") for name in ("query", "document"))
        parts = [template.get("prefix", ""), start, middle, next_start, end, template.get("suffix", "")]
        tokens = FastTokenizer(tokenizer, special_tokens=False)
        first, between, last = (
            tuple(tokens.ids([text], _MAX_TEMPLATE)[0])
            for text in (parts[0] + parts[1], parts[2] + parts[3], parts[4] + parts[5])
        )
        return replace(
            pair_format,
            before=pair_format.before + first,
            between=between,
            after=last + pair_format.after,
        )
    if source.head is not None and source.head.is_new and is_decoder(source.config) and not pair_format.between:
        raise ConfigError(
            "model.pair_template=null: the tokenizer puts nothing between the two texts of a pair; set "
            'model.pair_template, such as {query: "Query: {query}\\n", document: "Document: {document}\\n"}'
        )
    return pair_format
