"""Tokenizers: read from a directory, checked against the model, written for all readers, opened by transformers."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase

from embedtrain.config.recipe import Pooling
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.export_record import verify_settings
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.static_embedding import is_static, read_static_tokenizer
from embedtrain.models.file_references import read_json
from embedtrain.models.rope import batch_independent_length, has_rotary_positions, num_positions
from embedtrain.models.security import require_bounded_time, require_safe_files
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json
from embedtrain.utils.formatting import one_line

# Files of a Hub repository to download for its tokenizer alone.
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
_CONFIG, _TOKENIZER, _TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"  # fastembed requires it
# Transformers 4 knows a tokenizer without a class of its own by the second name, transformers 5 by both.
_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
# How and where the tokenizer was last used; fastembed cuts texts at `max_length`.
_STATE = (
    "backend",
    "is_local",
    "local_files_only",
    "max_length",
    "stride",
    "truncation_strategy",
    "pad_to_multiple_of",
)
# A list of tokens: transformers 4 fails on it under the first name, which is a dict there.
_EXTRA_TOKENS, _ADDITIONAL_TOKENS = "extra_special_tokens", "additional_special_tokens"
# Texts that show how a tokenizer begins and ends texts, and their maximal length.
_PROBES = ("a", "two words", "")
_PROBE_LENGTH = 64


def read_tokenizer(directory: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a directory's tokenizer unchanged; a ModelError if there is none, or it fails the security checks."""
    require_safe_files(directory, trust_remote_code=trust_remote_code)
    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ModelError(f"cannot read a tokenizer from {directory}: {one_line(error)}") from None
    if not isinstance(loaded, PreTrainedTokenizerBase):
        raise ModelError(f"cannot read a tokenizer from {directory}: its files define a {type(loaded).__name__}")
    require_bounded_time(loaded, str(directory))
    return loaded


def _drops_spaces(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a tokenizer of the Unigram model removes the whitespace around words, as XLM-R's does."""
    splitter = tokenizer.get("pre_tokenizer") or {}
    names = {part["type"] for part in splitter.get("pretokenizers", [splitter]) if part}
    return bool(tokenizer["model"]["type"] == "Unigram" and "WhitespaceSplit" in names)


def write_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Write the files of a tokenizer of texts of at most `max_length` tokens.

    The library tokenizers cuts where tokenizer.json says, fastembed where tokenizer_config.json says, and both contain
    what the tokenizer was last used for: all say `max_length`.
    """
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(directory)
    settings = {name: value for name, value in read_json(directory / _TOKENIZER_CONFIG).items() if name not in _STATE}
    settings["tokenizer_class"] = _CLASSES.get(settings["tokenizer_class"], settings["tokenizer_class"])
    # Transformers 4 has other defaults: without token_type_ids a pair has other scores, with them ModernBERT fails.
    settings["model_input_names"] = tokenizer.model_input_names
    if isinstance(tokens := settings.get(_EXTRA_TOKENS), list):
        del settings[_EXTRA_TOKENS]
        settings |= {_ADDITIONAL_TOKENS: tokens} if tokens else {}
    if (directory / _TOKENIZER).is_file():  # tokenizers in Python have other files
        content = read_json(directory / _TOKENIZER)
        if _drops_spaces(content):
            # llama.cpp keeps spaces otherwise: the name of the setting is that of decoding in transformers.
            settings["clean_up_tokenization_spaces"] = True
        truncation = {
            "direction": tokenizer.truncation_side.capitalize(), "max_length": max_length,
            "strategy": "LongestFirst", "stride": 0,
        }  # fmt: skip
        write_json(directory / _TOKENIZER, content | {"truncation": truncation, "padding": None})
    write_json(directory / _TOKENIZER_CONFIG, settings)
    write_json(directory / _SPECIAL_TOKENS, tokenizer.special_tokens_map)


def open_tokenizer(directory: Path, source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer as plain transformers loads it from a directory."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    return tokenizer


def tokenize_padded(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], documents: list[str] | None = None
) -> BatchEncoding:
    """One padded batch [N, L] of texts, or of their pairs with `documents`, cut to the model's maximum length."""
    return tokenizer(texts, documents, padding=True, truncation=True, return_tensors="pt")


def load_tokenizer(
    source: ModelSource, tokenizer: str | None = None, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `tokenizer` (directory or Hub id, at `revision`), or the model's own.

    It ends texts with the end-of-text token if `model.append_eos` is set, or by default with last-token pooling, unless
    the tokenizer of a sentence-transformers directory already decides.

    A ConfigError if there is none to load, a local directory has a revision, or `model.append_eos` is not supported; a
    ModelError if it cannot be read, has no padding token, or its files fail the security checks.
    """
    if tokenizer is None and source.directory is None:
        raise ConfigError("a model made from model.config has no tokenizer of its own: set model.tokenizer")
    path = tokenizer or str(source.directory)
    directory = resolve_directory(path, revision, "model.tokenizer", "model.tokenizer_revision", TOKENIZER_FILES)
    if tokenizer is not None:
        verify_settings(directory)
    static = is_static(source.config)
    if static and tokenizer is None:
        return read_static_tokenizer(directory)
    loaded = read_tokenizer(directory, trust_remote_code=source.trust_remote_code)
    if set(loaded.get_vocab()) <= set(loaded.all_special_tokens):
        # If the files are missing, transformers silently makes a tokenizer that maps every word to <unk>.
        raise ModelError(f"{path} has no tokenizer files: set model.tokenizer to its tokenizer")
    tokenization = source.tokenization
    if tokenization.lowercase:
        first = normalizers.Lowercase()
        backend = loaded.backend_tokenizer
        backend.normalizer = normalizers.Sequence([first, backend.normalizer] if backend.normalizer else [first])
    is_complete = tokenizer is None and tokenization.is_sentence_transformers
    by_default = source.vectors.pooling is Pooling.last and not is_complete
    by_default &= source.kind.ends_texts(source)
    _add_eos_token(loaded, tokenization.append_eos, path, by_default=by_default)
    _register_prompt_tokens(loaded, tokenization.prompt_tokens, path)
    if loaded.pad_token_id is None and not static:
        if loaded.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {path} has neither a padding nor an end-of-text token: set pad_token in its "
                "tokenizer_config.json to one of its tokens, or set model.tokenizer to a tokenizer that has one"
            )
        # Padding is masked everywhere, so any token works; LLM tokenizers often have no padding token.
        loaded.pad_token = loaded.eos_token
    return loaded


def check_vocabulary(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject a tokenizer that yields ids beyond the embedding table."""
    size = int(source.config.get_text_config().vocab_size)
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= size:
        raise ModelError(
            f"the tokenizer has ids up to {highest}, but the model's embedding table ends at {size - 1}: "
            f"use the model's own tokenizer"
        )


def resolve_max_length(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> int:
    """The maximal number of tokens per text: `model.max_length`, or what the model's positions allow, up to 8192.

    A ConfigError if `model.max_length` exceeds the model's positions.
    """
    config = source.config.get_text_config()
    limit, switch = num_positions(config), batch_independent_length(config)
    max_length = source.tokenization.max_length
    if max_length is not None and switch is not None and max_length > switch:
        raise ConfigError(
            f"model.max_length={max_length}: the positions of this {config.model_type} model follow the longest text "
            f"of a batch beyond {switch} tokens, so the embedding of a text would depend on the other texts: write "
            f"model.max_length={switch}, or model.rope_scaling={{rope_type: yarn, factor: "
            f"{math.ceil(max_length / switch)}}}"
        )
    limit = limit if switch is None else min(limit, switch)
    if max_length is not None:
        if limit and max_length > limit:
            factor = math.ceil(max_length / limit)
            alternative = f", or model.rope_scaling={{rope_type: yarn, factor: {factor}}} for more"
            raise ConfigError(
                f"model.max_length={max_length}: this {config.model_type} model has only {limit} positions: write "
                f"model.max_length={limit}"
                f"{alternative if has_rotary_positions(config) else ''}"
            )
        return max_length
    # Tokenizers without a limit report 1e30; more than 8192 tokens have to be set explicitly.
    return min(length for length in (limit or 8192, int(tokenizer.model_max_length), 8192) if length > 0)


def _add_eos_token(tokenizer: PreTrainedTokenizerBase, append_eos: bool | None, path: str, *, by_default: bool) -> None:
    """Make the tokenizer end texts with its end-of-text token, in place, unless it already does.

    The token becomes part of the tokenizer's post-processor, so truncation leaves room for it and `tokenizer.json`
    stores it (as of tokenizers 0.22 and transformers 5.23, which builds tokenizers of all kinds from it). If
    `append_eos` is None, a tokenizer that ends texts with any special token is unchanged; `by_default` decides for
    others. A ConfigError if the option is not supported; `path` is that of the tokenizer in messages.
    """
    if append_eos is None and not by_default:
        return
    end, last = tokenizer.eos_token_id, _final_special_token(tokenizer)
    if append_eos is False:
        if last is not None and last == end:
            raise ConfigError(
                f"model.append_eos=false: the tokenizer of {path} ends every text with {tokenizer.eos_token}, "
                "which cannot be removed; leave it out (null)"
            )
        return
    if end is None:
        if append_eos is None:
            return
        raise ConfigError(
            f"model.append_eos=true: the tokenizer of {path} has no end-of-text token; set eos_token in its "
            "tokenizer_config.json to one of its tokens, or leave append_eos out (null)"
        )
    if last == end or (append_eos is None and last is not None):
        return
    expected = [[*_ids(tokenizer, text), end] for text in _PROBES]
    is_added = _append_to_post_processor(tokenizer, str(tokenizer.eos_token), int(end))
    if not is_added or [_ids(tokenizer, text) for text in _PROBES] != expected:
        raise ConfigError(
            f"the tokenizer of {path} ({type(tokenizer).__name__}) does not support adding "
            f"{tokenizer.eos_token} to texts: write model.append_eos=false to train without it, or provide a "
            "tokenizer.json that adds it"
        )


def _register_prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], path: str) -> None:
    """Make prompts that are one token of the vocabulary, or begin with one, that token wherever a text has them.

    ColBERT inserts the id of such a token after the first one of a text. Without this the tokenizer would split
    `[unused0]`, and one that lowercases would not find `[Q] `. A prompt that the vocabulary does not have is text, as
    in sentence-transformers (6.2). A ModelError if the ids are not those of an insertion.
    """
    vocabulary = tokenizer.get_vocab()
    for prompt in prompts:
        token = next((text for text in (prompt, *prompt.split(None, 1)[:1]) if text in vocabulary), None)
        if token is None:
            continue
        if tokenizer.tokenize(token) != [token]:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=True)], special_tokens=True)
        for text in _PROBES if prompt.strip() == token.strip() else ():
            first, *rest = _ids(tokenizer, text) or [-1]
            if _ids(tokenizer, prompt + text) != [first, vocabulary[token], *rest]:
                raise ModelError(
                    f"the tokenizer of {path}: {prompt!r} is a token after the first one of a text, and before a text "
                    "it is not: such a tokenizer is not supported in a late-interaction model"
                )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=_PROBE_LENGTH)["input_ids"]
    return ids


def _final_special_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that ends every text, if there is one."""
    ends = [_ids(tokenizer, text)[-1:] for text in _PROBES[:2]]
    return ends[0][0] if ends[0] and ends[0] == ends[1] and ends[0][0] in tokenizer.all_special_ids else None


def _append_to_post_processor(tokenizer: PreTrainedTokenizerBase, token: str, number: int) -> bool:
    """Whether the post-processor could be changed."""
    try:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception:  # slow tokenizers have no backend, and parts in Python cannot be serialised
        return False
    rules["post_processor"] = _with_token(rules["post_processor"], token, number)
    changed = Tokenizer.from_str(json.dumps(rules))
    tokenizer.backend_tokenizer.post_processor = changed.post_processor
    return True


def _with_token(processor: dict[str, Any] | None, token: str, number: int) -> dict[str, Any]:
    """A post-processor that does the same and appends the token."""
    if processor is None:
        return _only_token(token, number)
    if _is_template(processor):
        special = processor["special_tokens"] | {token: {"id": token, "ids": [number], "tokens": [token]}}
        single, pair = (
            [*pieces, {"SpecialToken": {"id": token, "type_id": next(iter(pieces[-1].values()))["type_id"]}}]
            for pieces in (processor["single"], processor["pair"])
        )
        return processor | {"single": single, "pair": pair, "special_tokens": special}
    parts = processor["processors"] if processor["type"] == "Sequence" else [processor]
    # A second template would treat what the first one added as texts.
    if any(map(_is_template, parts)):
        parts = [_with_token(part, token, number) if _is_template(part) else part for part in parts]
    else:
        parts = [*parts, _only_token(token, number)]
    return {"type": "Sequence", "processors": parts}


def _is_template(processor: dict[str, Any]) -> bool:
    return bool(processor["type"] == "TemplateProcessing")


def _only_token(token: str, number: int) -> dict[str, Any]:
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    nothing = {"type": "TemplateProcessing", "special_tokens": {}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return _with_token({**nothing, "single": single, "pair": pair}, token, number)
