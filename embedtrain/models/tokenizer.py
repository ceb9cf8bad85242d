"""A model's tokenizer, whether it belongs to the model, and how many tokens of a text are kept."""

import json
import math
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from embedtrain.config.recipe import Pooling
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.hub import one_line, resolve_directory
from embedtrain.models.rope import has_rotary_positions
from embedtrain.models.security import require_safe_files
from embedtrain.models.source import ModelSource

_PROBES = ("a", "two words", "")
_LENGTH = 64


def add_eos_token(tokenizer: PreTrainedTokenizerBase, asked: bool | None, where: str, *, by_default: bool) -> None:
    """Let the tokenizer end texts with its end-of-text token, in place, if it is to and does not do so yet.

    Args:
        tokenizer: as it was read.
        asked: `model.append_eos`; None leaves a tokenizer alone that ends texts with any special token.
        where: it was read from.
        by_default: whether it is to where nothing is asked.

    Raises:
        ConfigError: it has no such token, cannot be told to add it, or adds it and is not to.
    """
    if asked is None and not by_default:
        return
    end, last = tokenizer.eos_token_id, _last_of_all(tokenizer)
    if asked is False:
        if last is not None and last == end:
            raise ConfigError(
                f"model.append_eos=false: the tokenizer of {where} ends every text with {tokenizer.eos_token} itself, "
                "and nothing is taken away from a tokenizer here; leave it out (null)"
            )
        return
    if end is None:
        if asked is None:
            return
        raise ConfigError(
            f"model.append_eos=true: the tokenizer of {where} has no end-of-text token; name one of its tokens as "
            "eos_token in its tokenizer_config.json, or leave append_eos out (null)"
        )
    if last == end or (asked is None and last is not None):
        return
    wanted = [[*_ids(tokenizer, text), end] for text in _PROBES]
    changed = _add(tokenizer, str(tokenizer.eos_token), int(end))
    if not changed or [_ids(tokenizer, text) for text in _PROBES] != wanted:
        raise ConfigError(
            f"the tokenizer of {where} ({type(tokenizer).__name__}) cannot be told to end texts with "
            f"{tokenizer.eos_token}: write model.append_eos=false to train without, or give it a tokenizer.json that "
            "does so"
        )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=_LENGTH)["input_ids"]
    return ids


def _last_of_all(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that ends every text; None where there is none."""
    ends = {tuple(_ids(tokenizer, text)[-1:]) for text in _PROBES[:2]}
    found = next(iter(ends)) if len(ends) == 1 else ()
    return found[0] if found and found[0] in tokenizer.all_special_ids else None


def _add(tokenizer: PreTrainedTokenizerBase, token: str, number: int) -> bool:
    """Whether its rules have been changed."""
    try:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception:  # a slow one has none, and parts in Python cannot be told as JSON
        return False
    rules["post_processor"] = _with_end(rules["post_processor"], token, number)
    changed = Tokenizer.from_str(json.dumps(rules))
    tokenizer.backend_tokenizer.post_processor = changed.post_processor
    return True


def _with_end(processor: dict[str, Any] | None, token: str, number: int) -> dict[str, Any]:
    """A post-processor that does the same and adds the token at the end."""
    if processor is None:
        return _alone(token, number)
    if _is_template(processor):
        special = processor["special_tokens"] | {token: {"id": token, "ids": [number], "tokens": [token]}}
        single, pair = (
            [*pieces, {"SpecialToken": {"id": token, "type_id": _last_type(pieces)}}]
            for pieces in (processor["single"], processor["pair"])
        )
        return processor | {"single": single, "pair": pair, "special_tokens": special}
    parts = processor["processors"] if processor["type"] == "Sequence" else [processor]
    # Of two templates in a row the second takes what the first has added for texts of their own.
    if any(map(_is_template, parts)):
        parts = [_with_end(part, token, number) if _is_template(part) else part for part in parts]
    else:
        parts = [*parts, _alone(token, number)]
    return {"type": "Sequence", "processors": parts}


def _is_template(processor: dict[str, Any]) -> bool:
    return bool(processor["type"] == "TemplateProcessing")


def _last_type(pieces: list[dict[str, Any]]) -> int:
    return int(next(iter(pieces[-1].values()))["type_id"])


def _alone(token: str, number: int) -> dict[str, Any]:
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    nothing = {"type": "TemplateProcessing", "special_tokens": {}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return _with_end({**nothing, "single": single, "pair": pair}, token, number)


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
    directory = resolve_directory(where, revision, "model.tokenizer", "model.tokenizer_revision", _FILES)
    loaded = read_tokenizer(directory, trust_remote_code=source.trust_remote_code)
    if set(loaded.get_vocab()) <= set(loaded.all_special_tokens):
        # Where the files are missing transformers makes one that turns every word into <unk>, without a word.
        raise ModelError(f"{where} has no tokenizer files: set model.tokenizer to the tokenizer that belongs to it")
    if source.lowercase:
        first = normalizers.Lowercase()
        backend = loaded.backend_tokenizer
        backend.normalizer = normalizers.Sequence([first, backend.normalizer] if backend.normalizer else [first])
    by_default = source.pooling is Pooling.last and (tokenizer is not None or not source.is_whole)
    add_eos_token(loaded, source.append_eos, where, by_default=by_default)
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
    require_safe_files(directory, trust_remote_code=trust_remote_code)
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


def resolve_max_length(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> int:
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
