"""The tokenizer of a model with its maximal lengths, for what the model encodes: texts, pairs, or only documents."""

from transformers import PreTrainedTokenizerBase

from embedtrain.data.tokens import TextTokenizer
from embedtrain.models.tokenizer import check_vocabulary, resolve_max_length
from embedtrain.models.types import ModelSource


def bound_tokenizer(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    """The tokenizer with the layout and the maximal lengths of the model."""
    check_vocabulary(source, tokenizer)
    max_length = resolve_max_length(source, tokenizer)
    return TextTokenizer(tokenizer, max_length, source.kind.layout(source, tokenizer))
