"""How a cross-encoder reads a pair: the pair format of its tokenizer, checked against the model."""

from transformers import PreTrainedTokenizerBase

from embedtrain.data.pairs import PairFormat
from embedtrain.errors import ConfigError
from embedtrain.models.attention_direction import is_decoder
from embedtrain.models.source import ModelSource


def read_pair_format(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> PairFormat:
    """The format in which a cross-encoder reads pairs.

    A ConfigError if a new head is trained on pairs whose texts follow each other without anything between them; a
    ModelError if the tokenizer's pairs are not its texts and special tokens around them.
    """
    types = int(getattr(source.config.get_text_config(), "type_vocab_size", 0) or 0) > 1
    pair_format = PairFormat.of(tokenizer, token_types=types)
    if source.head is not None and source.head.is_new and is_decoder(source.config) and not pair_format.between:
        raise ConfigError(
            "model.pair_template=null: the tokenizer puts nothing between the two texts of a pair; set "
            'model.pair_template, such as {query: "Query: {query}\\n", document: "Document: {document}\\n"}'
        )
    return pair_format
