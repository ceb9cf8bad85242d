"""Directories of transformers: configuration and tokenizer, checked when they are read and written for all readers.

Transformers 4, text-embeddings-inference, vLLM, infinity, fastembed and llama.cpp read fields that transformers 5 no
longer writes, or writes under names and in forms that they do not know.
"""

import difflib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import (
    CONFIG_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    BatchEncoding,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.export_record import verify_settings
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.static_embedding import is_static, read_static_tokenizer
from embedtrain.models.encoder import disable_unused
from embedtrain.models.file_references import read_json
from embedtrain.models.rope import batch_independent_length, has_rotary_positions, num_positions, with_rope_theta
from embedtrain.models.security import require_bounded_time, require_safe_config, require_safe_files
from embedtrain.models.stored_weights import stored_tensors
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
# Decoders for which text-embeddings-inference reads the direction of attention under this name.
_BIDIRECTIONAL, _BIDIRECTIONAL_TYPES = "use_bidirectional_attention", ("llama", "mistral", "qwen3")
# Encoders whose implementation in vLLM requires `position_embedding_type`, which transformers 4 wrote.
_ABSOLUTE_POSITIONS = ("roberta", "xlm-roberta")
# Rotary parameters of kinds of layers, and their names in configurations of transformers 4.
_THETAS = {
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
}


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
    has_scaling = model_option("rope_scaling") == "model.rope_scaling"  # a tower has no such option
    if max_length is not None and switch is not None and max_length > switch:
        raise ConfigError(
            f"{model_option('max_length')}={max_length}: the positions of this {config.model_type} model follow the "
            "longest text "
            f"of a batch beyond {switch} tokens, so the embedding of a text would depend on the other texts: write "
            f"{model_option('max_length')}={switch}{_scaling(max_length / switch) if has_scaling else ''}"
        )
    limit = limit if switch is None else min(limit, switch)
    if max_length is not None:
        if limit and max_length > limit:
            alternative = f"{_scaling(max_length / limit)} for more"
            raise ConfigError(
                f"{model_option('max_length')}={max_length}: this {config.model_type} model has only {limit} "
                "positions: write "
                f"{model_option('max_length')}={limit}"
                f"{alternative if has_scaling and has_rotary_positions(config) else ''}"
            )
        return max_length
    # Tokenizers without a limit report 1e30; more than 8192 tokens have to be set explicitly.
    return min(length for length in (limit or 8192, int(tokenizer.model_max_length), 8192) if length > 0)


def _scaling(factor: float) -> str:
    return f", or model.rope_scaling={{rope_type: yarn, factor: {math.ceil(factor)}}}"


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


def read_config(directory: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration in a model directory; a ModelError if it cannot be read, or needs code that is not trusted."""
    settings = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    if "auto_map" in settings and not trust_remote_code and str(settings.get("model_type")) not in CONFIG_MAPPING:
        raise ModelError(
            f"{directory / 'config.json'} needs Python code of the model (auto_map): review it, and if you trust its "
            "authors write trust_remote_code=true (model.trust_remote_code=true for train) on the command line"
        )
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises nearly anything for invalid values
        raise ModelError(
            f"cannot read a model configuration from {directory} ({type(error).__name__}: {one_line(error)})"
        ) from None
    return check_config(config, str(directory))


def check_config(config: PretrainedConfig, where: str) -> PretrainedConfig:
    """The same configuration without what training does not use; a ModelError if it is not supported."""
    if config.is_encoder_decoder:
        raise ModelError(f"{where} holds {config.model_type}, an encoder-decoder; supported are encoders and decoders")
    require_safe_config(config, where)
    disable_unused(config)
    return config


def reject_typos(values: dict[str, Any], config: PretrainedConfig) -> None:
    """Transformers accepts an unknown key silently and builds the model without it."""
    for name in values:
        matches = difflib.get_close_matches(name, config.to_dict(), n=1, cutoff=0.8)
        if matches and not hasattr(config, name):
            raise ConfigError(f"model.config.{name}: {config.model_type} has no such value; did you mean {matches[0]}?")


def write_config(directory: Path, config: PretrainedConfig) -> None:
    """Write config.json with the class of transformers that the weights of an encoder without head belong to.

    text-embeddings-inference and infinity reject a model without `architectures`, and vLLM takes a backbone whose file
    names a language model for that. Rotary positions and kinds of layers are written in the form of transformers 4,
    too, which would otherwise use its defaults.
    """
    config.save_pretrained(directory)
    stored = read_json(directory / _CONFIG)
    _write(directory, stored | _architectures(stored, config))


def write_code(directory: Path, source: ModelSource) -> None:
    """Copy a model's own Python if it is trusted, otherwise remove the references to it.

    transformers only saves the file with the configuration class, with which the model could not be opened.
    """
    if not source.trust_remote_code:
        remove_code(directory)
    elif source.directory is not None:
        for path in source.directory.glob("*.py"):
            shutil.copyfile(path, directory / path.name)


def remove_code(directory: Path) -> None:
    """Remove the Python of a model directory, and the settings of the model and its tokenizer that refer to some.

    A directory that is written without trust has no code of others, so that trust in it gives them none.
    """
    for path in directory.rglob("*.py"):
        path.unlink()
    for path in directory.rglob("*config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(settings, dict) and settings.pop("auto_map", None) is not None:
            write_json(path, settings)


def write_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Record in config.json the type in which the weights are stored."""
    path = directory / "config.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")})


def complete_older_files(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
    """Write what the directory lacks if it comes from a run of a version that wrote fewer settings.

    Those wrote `architectures` for classifiers and language models only.
    """
    if not source.kind.files.is_transformers(source) or "architectures" in (stored := read_json(directory / _CONFIG)):
        return
    _write(directory, stored | _architectures(stored, source.config))
    write_tokenizer(directory, tokenizer.tokenizer, tokenizer.max_length)


def _architectures(stored: Mapping[str, Any], config: PretrainedConfig) -> dict[str, list[str]]:
    """The class of transformers that the weights belong to; empty if it has none for them."""
    model_class = MODEL_MAPPING.get(type(config), None)
    own_class = stored.get("auto_map", {}).get("AutoModel", "").rpartition(".")[2]  # of trusted Python code
    name = own_class if model_class is None else model_class.__name__
    return {"architectures": [name]} if name else {}


def _write(directory: Path, stored: Mapping[str, Any]) -> None:
    """Write config.json with the settings that other readers look for under other names."""
    settings = {**stored, **_rotary_settings(stored), **_layer_settings(stored)}
    if stored["model_type"] == "gemma3_text":
        # text-embeddings-inference requires one base in them; all readers know the names of transformers 4.
        settings.pop("rope_parameters", None)
    write_json(directory / _CONFIG, settings)


def write_rope_theta(directory: Path, theta: float) -> None:
    """Change the base of the rotary positions in config.json, in the forms of transformers 4 and 5.

    Raises ConfigError if the model has none.
    """
    stored = read_json(directory / _CONFIG)
    before = _rotary_parameters(stored)
    parameters = with_rope_theta(before, theta)
    if not before or parameters is None:
        raise ConfigError(f"export.rope_theta={theta:g}: {stored['model_type']} has no rotary positions; leave it out")
    _write(directory, {**stored, "rope_parameters": parameters})


def _rotary_parameters(stored: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a configuration that `_write` wrote; empty if the model has no rotary positions."""
    if stored["model_type"] != "gemma3_text" or "rope_parameters" in stored:
        return dict(stored.get("rope_parameters") or {})
    full = {"rope_type": "default", **(stored.get("rope_scaling") or {}), "rope_theta": stored["rope_theta"]}
    sliding = {"rope_type": "default", "rope_theta": stored["rope_local_base_freq"]}
    return {"full_attention": full, "sliding_attention": sliding}


def _rotary_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions as transformers 4 and engines with code of their own read them."""
    parameters = stored.get("rope_parameters") or {}
    if names := _THETAS.get(stored["model_type"]):
        thetas = {name: parameters[kind]["rope_theta"] for kind, name in names.items() if kind in parameters}
        scaling = {key: value for key, value in parameters.get("full_attention", {}).items() if key != "rope_theta"}
        scaled = scaling.get("rope_type", "default") != "default"
        return thetas | ({"rope_scaling": scaling} if scaled and stored["model_type"] == "gemma3_text" else {})
    if "rope_theta" not in parameters:
        return {}
    settings = {"rope_theta": parameters["rope_theta"]}
    if "partial_rotary_factor" in parameters:
        settings["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    if parameters.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {key: value for key, value in parameters.items() if key not in settings}
    return settings


def _layer_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The direction of attention, the layers with full attention and others, as other readers look for them."""
    if stored["model_type"] in _ABSOLUTE_POSITIONS:
        return {"position_embedding_type": "absolute"}
    if stored["model_type"] in _BIDIRECTIONAL_TYPES and stored.get("is_causal") is False:
        return {_BIDIRECTIONAL: True}
    if stored["model_type"] == "modernbert":
        layers = stored.get("layer_types") or ()
        is_full = [layer == "full_attention" for layer in layers]
        distances = range(1, len(layers) + 1)
        regular = [n for n in distances if is_full == [index % n == 0 for index in range(len(layers))]]
        # llama.cpp reads the constant of layer norms under the name that BERT has for it.
        constant = {"layer_norm_eps": stored["norm_eps"]}
        return constant | ({"global_attn_every_n_layers": regular[0]} if regular else {})
    return {}


def open_checked(auto_class: Any, directory: Path, source: ModelSource) -> Any:
    """The float32 model that a class of transformers loads; CheckpointError if a weight is missing or unexpected."""
    try:
        model, report = auto_class.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # a model's own code may raise anything
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for name in report[kind]:
            raise CheckpointError(f"transformers opens {directory}, and reports {kind.replace('_', ' ')}: {name}")
    return model


def compare_shapes(directory: Path, shapes: dict[str, list[int]]) -> None:
    """Raise CheckpointError unless the directory's weights have these names and shapes; reads no weights."""
    stored = stored_tensors(directory)
    for name in sorted(stored.keys() ^ shapes.keys()):
        raise CheckpointError(f"{directory}: {name} is {'unexpected' if name in stored else 'missing'} in its files")
    for name, location in stored.items():
        with safe_open(location.path, framework="pt") as file:
            shape = file.get_slice(location.key).get_shape()
        if shape != shapes[name]:
            raise CheckpointError(f"{location.path}: {name} has the shape {shape}, the model expects {shapes[name]}")
