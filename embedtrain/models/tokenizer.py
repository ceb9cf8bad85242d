"""A model's tokenizer, whether it belongs to the model, and how many tokens of a text are kept."""

import math
from pathlib import Path

from tokenizers import normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from embedtrain.config.schema import Pooling
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.end_of_text import append_end
from embedtrain.models.gate import require_harmless
from embedtrain.models.hub import local_directory, one_line
from embedtrain.models.rotary import has_rotary_positions
from embedtrain.models.source import ModelSource

# Position numbers of these models start behind the padding id, so that many fewer tokens fit.
_POSITIONS_AFTER_PADDING = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "mpnet", "xmod"}


# Of a Hub repository that is only asked for its tokenizer.
_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]


def load_tokenizer(
    source: ModelSource, tokenizer: str | None = None, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer in `tokenizer` (directory or Hub id, there at `revision`), else the model's own.

    It ends texts with the end-of-text token where that was asked for, or where vectors are made of the last token and
    nobody has said before how the model's texts end.

    Raises:
        ConfigError: a model made from model.config has none, and none is named; a revision of a directory; or
            `model.append_eos` cannot be had.
        ModelError: there is none, it has no padding token, or its files ask for more than to be read.
    """
    if tokenizer is None and source.directory is None:
        raise ConfigError("a model made from model.config has no tokenizer of its own: set model.tokenizer")
    where = tokenizer or str(source.directory)
    directory = local_directory(where, revision, "model.tokenizer", "model.tokenizer_revision", _FILES)
    loaded = read_tokenizer(directory, trust_remote_code=source.trust_remote_code)
    if set(loaded.get_vocab()) <= set(loaded.all_special_tokens):
        # Where the files are missing transformers makes one that turns every word into <unk>, without a word.
        raise ModelError(f"{where} has no tokenizer files: set model.tokenizer to the tokenizer that belongs to it")
    if source.lowercase:
        first = normalizers.Lowercase()
        backend = loaded.backend_tokenizer
        backend.normalizer = normalizers.Sequence([first, backend.normalizer] if backend.normalizer else [first])
    by_default = source.pooling is Pooling.last and (tokenizer is not None or not source.is_whole)
    append_end(loaded, source.append_eos, where, by_default=by_default)
    if loaded.pad_token_id is None:
        if loaded.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {where} has neither a padding nor an end-of-text token: name one of its tokens as "
                "pad_token in its tokenizer_config.json, or set model.tokenizer to a tokenizer that has one"
            )
        # Padding is masked out everywhere, so any known token does; LLM tokenizers often have none of their own.
        loaded.pad_token = loaded.eos_token
    return loaded


def read_tokenizer(directory: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory, as it is.

    Raises:
        ModelError: there is none, or its files ask for more than to be read.
    """
    require_harmless(directory, trust_remote_code=trust_remote_code)
    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ModelError(f"no tokenizer can be read from {directory}: {one_line(error)}") from None
    if not isinstance(loaded, PreTrainedTokenizerBase):
        raise ModelError(f"no tokenizer can be read from {directory}: its files make a {type(loaded).__name__} instead")
    return loaded


def check_vocabulary(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that yields ids beyond the embedding table.

    Raises:
        ModelError: with both sizes.
    """
    size = int(source.config.get_text_config().vocab_size)
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= size:
        raise ModelError(
            f"the tokenizer knows ids up to {highest} but the model's embedding table ends at {size - 1}: "
            f"use the tokenizer that belongs to the model"
        )


def text_length(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of a text that are kept: what was asked, as far as the model's positions reach.

    Raises:
        ConfigError: more was asked than the model has positions for.
    """
    config = source.config.get_text_config()
    limit = max(0, int(getattr(config, "max_position_embeddings", 0) or 0))  # XLNet says -1
    if limit and config.model_type in _POSITIONS_AFTER_PADDING:
        limit -= int(config.pad_token_id or 0) + 1
    if source.max_length is not None:
        if limit and source.max_length > limit:
            factor = math.ceil(source.max_length / limit)
            stretched = f", or model.rope_scaling={{rope_type: yarn, factor: {factor}}} for more"
            raise ConfigError(
                f"model.max_length={source.max_length} is more than the {limit} tokens that this "
                f"{config.model_type} model has positions for: write model.max_length={limit}"
                f"{stretched if has_rotary_positions(config) else ''}"
            )
        return source.max_length
    # Tokenizers without a limit say 1e30; texts beyond 8192 tokens are asked for by hand.
    return min(length for length in (limit or 8192, int(tokenizer.model_max_length), 8192) if length > 0)
