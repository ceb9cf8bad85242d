"""Directories of late-interaction models: of PyLate, sentence-transformers 6 and Stanford's ColBERT.

PyLate's are also written. All that are read become the same settings; what none of our models computes, such as pooled
tokens, is a ModelError.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from embedtrain.config.kind_settings import (
    DEFAULT_EXPANSION_LENGTH,
    Expansion,
    QueryExpansion,
    TokenSimilarity,
    TokenVectors,
)
from embedtrain.errors import ModelError
from embedtrain.formats.page_models import describe, writer_of
from embedtrain.formats.sentence_transformers import (
    IDENTITY,
    MULTI_VECTOR,
    PYLATE,
    SETTINGS,
    Module,
    prompts_of,
    read_dense,
    read_modules,
    read_transformer_settings,
)
from embedtrain.models.file_references import read_json
from embedtrain.models.security import weight_files
from embedtrain.models.types import DenseSource, ModelSource

STANFORD = "HF_ColBERT"
METADATA = "artifact.metadata"  # of Stanford's ColBERT
PYLATE_DENSE, INLINE = "pylate.models.Dense.Dense", "linear"
PROJECTION = f"{INLINE}.weight"
_TOKENS = "token_embeddings"
_ROLES = ("query", "document")
# Top-level settings of PyLate. A directory with one of them is its own, or one that it opens as well.
_PYLATE_KEYS = (
    "query_prefix",
    "document_prefix",
    "query_length",
    "document_length",
    "attend_to_expansion_tokens",
    "skiplist_words",
    "do_query_expansion",
)
_MAXSIM = "MaxSim"  # the similarity of PyLate by default
# Texts that show which token ids a prompt adds.
_PREFIX_PROBES = ("a", "two words", "What is it?")
_EXPANSION_KEYS = {"strategy", "attend", "token", "length"}
_MAX_LENGTH, _MAX_WORDS, _MAX_CHARACTERS = 1 << 20, 100_000, 1000
_MAX_METADATA_BYTES = 1 << 20
# Scores of one vector per text, which sentence-transformers ignores in a late-interaction model.
_OTHER_SIMILARITIES = (_MAXSIM, "cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True, kw_only=True)
class LateInteractionFiles:
    """What the directory of a late-interaction model says of itself, besides configuration and tokenizer."""

    transformer: Path  # directory of backbone and tokenizer
    dense: tuple[DenseSource, ...]
    token_vectors: TokenVectors
    prompts: dict[str, str]
    prompt_tokens: tuple[str, ...] = ()  # prompts that begin with one token of the vocabulary
    lowercase: bool = False


def late_interaction_format(directory: Path) -> str | None:
    """Which late-interaction model a directory holds, in words for a message; None for other models."""
    settings = _json_if_any(directory / SETTINGS)
    if (directory / "modules.json").is_file():
        if settings.get("model_type") == MULTI_VECTOR:
            return f"a {MULTI_VECTOR} of sentence-transformers"
        types = [module.type for module in read_modules(directory)]
        has_keys = any(key in settings for key in _PYLATE_KEYS)
        if settings.get("model_type") == PYLATE or has_keys or PYLATE_DENSE in types:
            return "a ColBERT of PyLate"
        return None
    if (writer := writer_of(directory)) is not None:
        return describe(writer)
    architectures = _json_if_any(directory / "config.json").get("architectures")
    return "a ColBERT of Stanford" if isinstance(architectures, list) and STANFORD in architectures else None


def read_late_interaction(directory: Path) -> LateInteractionFiles:
    """Read a directory for which `late_interaction_format` returns a name."""
    if not (directory / "modules.json").is_file():
        return _read_stanford(directory)
    settings, modules = _json_if_any(directory / SETTINGS), read_modules(directory)
    is_pylate = settings.get("model_type") != MULTI_VECTOR
    _check_modules(directory, modules, is_pylate=is_pylate)
    transformer = modules[0].path
    stored = read_transformer_settings(transformer)
    _check_transformer(transformer, stored)
    prefixes = {role: _prefix(directory / SETTINGS, settings, role) for role in _ROLES if f"{role}_prefix" in settings}
    mask = next((module.path for module in modules if module.kind == "MultiVectorMask"), None)
    if mask is not None:
        words, skips_queries = _read_mask(mask / "config.json")
    else:
        words = _words(directory / SETTINGS, settings.get("skiplist_words"), list(string.punctuation))
        skips_queries = False
    query_length, document_length, expansion = _lengths(directory / SETTINGS, settings, transformer, stored)
    prompts = settings.get("prompts") or {}
    for role, prefix in prefixes.items():
        if isinstance(prompts, dict):  # the prompt of a directory may contain the prefix already
            prompts = prompts | {role: prefix + str(prompts.get(role) or "").removeprefix(prefix)}
    return LateInteractionFiles(
        transformer=transformer,
        dense=tuple(_read_projection(module) for module in modules if module.kind in ("Dense", PYLATE_DENSE)),
        token_vectors=TokenVectors(
            query_length=query_length,
            document_length=document_length,
            expansion=expansion,
            skiplist_words=words,
            skiplist_queries=skips_queries,
            similarity=token_similarity(directory / SETTINGS, settings),
        ),
        prompts=prompts_of(settings | {"prompts": prompts}, directory / SETTINGS),
        prompt_tokens=tuple(prefix for prefix in prefixes.values() if prefix),
        lowercase=bool(stored.get("do_lower_case")),
    )


def _json_if_any(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


def _check_modules(directory: Path, modules: list[Module], *, is_pylate: bool) -> None:
    """In PyLate's directories the projections are all; the mask and the normalisation follow in its code."""
    kinds = [module.kind for module in modules]
    heads = ["Dense"] * max(1, sum(kind in ("Dense", PYLATE_DENSE) for kind in kinds))
    ends = [[], ["MultiVectorMask", "Normalize"]] if is_pylate else [["MultiVectorMask", "Normalize"]]
    orders = [["Transformer", *heads, *end] for end in ends]
    orders += [["Transformer", "MultiVectorMask", *heads, "Normalize"]] * (not is_pylate)
    if ["Dense" if kind == PYLATE_DENSE else kind for kind in kinds] not in orders:
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(kinds) or 'none'}; supported in a "
            "late-interaction model are Transformer, one or more Dense, MultiVectorMask and Normalize, in this order"
        )
    for module in modules:
        if module.kind == "Normalize":
            path = module.path / "config.json"
            name = _json_if_any(path).get("module_input_name")
            if name != _TOKENS:
                raise ModelError(f"{path}: module_input_name={name!r}; in a late-interaction model it is {_TOKENS}")


def _check_transformer(directory: Path, settings: Mapping[str, Any]) -> None:
    task = settings.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ModelError(f"{directory}: transformer_task={task} is not supported in a late-interaction model")
    modalities = settings.get("modality_config")
    if isinstance(modalities, dict) and set(modalities) != {"text"}:
        raise ModelError(
            f"{directory} has the modality_config {', '.join(map(str, modalities)) or 'nothing'}; supported is text, "
            "without a chat template"
        )


def _read_projection(module: Module) -> DenseSource:
    """The Dense module of PyLate projects tokens, whatever the names of its inputs."""
    path = module.path / "config.json"
    settings = {} if module.kind == PYLATE_DENSE else read_json(path)
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, _TOKENS):
            raise ModelError(f"{path}: {key}={settings[key]!r:.200}; in a late-interaction model it is {_TOKENS}")
    return read_dense(module.path)


def _read_mask(path: Path) -> tuple[tuple[str, ...], bool]:
    """The skip list, and whether it holds for queries as well."""
    settings = _json_if_any(path)
    kept = settings.get("keep_only_token_ids")
    if kept:
        raise ModelError(f"{path}: keep_only_token_ids={kept!r:.200} is not supported: it keeps tokens of images alone")
    tasks = settings.get("skiplist_tasks")
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    words = _words(path, settings.get("skiplist_words"), [])
    if tasks == []:
        return (), False
    if not isinstance(tasks, list) or "document" not in tasks or set(tasks) - set(_ROLES):
        raise ModelError(f"{path}: skiplist_tasks={tasks!r:.200}; supported are [document] and [query, document]")
    return words, "query" in tasks


def _words(path: Path, words: Any, default: list[str]) -> tuple[str, ...]:
    words = default if words is None else words
    is_list = isinstance(words, list) and len(words) <= _MAX_WORDS
    if not is_list or not all(isinstance(word, str) and len(word) <= _MAX_CHARACTERS for word in words):
        raise ModelError(
            f"{path}: skiplist_words={words!r:.200} is not a list of at most {_MAX_WORDS:,} words of at most "
            f"{_MAX_CHARACTERS:,} characters"
        )
    return tuple(words)


def _prefix(path: Path, settings: Mapping[str, Any], role: str) -> str:
    prefix = settings[f"{role}_prefix"]
    if prefix is not None and (not isinstance(prefix, str) or len(prefix) > _MAX_CHARACTERS):
        raise ModelError(
            f"{path}: {role}_prefix={prefix!r:.200} is not a text of at most {_MAX_CHARACTERS:,} characters"
        )
    return prefix or ""


def _lengths(
    path: Path, settings: Mapping[str, Any], transformer: Path, stored: Mapping[str, Any]
) -> tuple[int | None, int | None, Expansion | None]:
    """Tokens of queries and documents, and the expansion of queries.

    In sentence-transformers those of the Transformer have precedence; the others are PyLate's, which expands queries
    unless a setting says otherwise. PyLate sets `max_seq_length` to the length of what it has encoded last.
    """
    config = transformer / "sentence_bert_config.json"
    top = [_length(path, settings, f"{role}_length") for role in _ROLES]
    own = [_length(config, stored, f"{role}_length") for role in _ROLES]
    query_length, document_length = (first or second for first, second in zip(own, top, strict=True))
    if "query_expansion" in stored:
        expansion = _expansion(config, stored["query_expansion"])
    elif "query_expansion" in settings:
        expansion = _expansion(path, settings["query_expansion"])
    elif any(key in settings for key in _PYLATE_KEYS) and settings.get("do_query_expansion") is not False:
        attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        length = top[0] or DEFAULT_EXPANSION_LENGTH
        expansion = Expansion(strategy=QueryExpansion.fixed, length=length, attend=bool(attend))
        query_length = own[0]
    else:
        expansion = None
    if expansion is not None and query_length is not None and query_length < expansion.length:
        raise ModelError(
            f"{config}: query_length={query_length} is below the length {expansion.length} of expanded queries"
        )
    if settings.get("model_type") == MULTI_VECTOR:
        max_length = stored.get("max_seq_length")
        query_length, document_length = query_length or max_length, document_length or max_length
    return query_length, document_length, expansion


def _length(path: Path, settings: Mapping[str, Any], key: str) -> int | None:
    value = settings.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_LENGTH):
        raise ModelError(f"{path}: {key}={value!r:.200} is not a number of tokens from 1 to {_MAX_LENGTH:,}")
    return value


def _expansion(path: Path, settings: Any) -> Expansion | None:
    if settings is None:
        return None
    if not isinstance(settings, dict) or set(settings) - _EXPANSION_KEYS:
        raise ModelError(
            f"{path}: query_expansion={settings!r:.200} is not a mapping with {', '.join(sorted(_EXPANSION_KEYS))}"
        )
    strategy, token, attend = settings.get("strategy"), settings.get("token"), settings.get("attend", False)
    length = _length(path, {"query_expansion.length": settings.get("length")}, "query_expansion.length")
    if strategy not in (QueryExpansion.min.value, QueryExpansion.fixed.value) or length is None:
        raise ModelError(f"{path}: query_expansion={settings!r:.200} needs a strategy, min or fixed, and a length")
    if not isinstance(attend, bool) or not isinstance(token, str | None):
        raise ModelError(f"{path}: query_expansion={settings!r:.200}: attend is true or false, and token a text")
    return Expansion(strategy=QueryExpansion(strategy), length=length, token=token, attend=attend)


def token_similarity(path: Path, settings: Mapping[str, Any]) -> TokenSimilarity:
    """The similarity in a file of sentence-transformers; a ModelError if it is not known."""
    name = settings.get("similarity_fn_name") or TokenSimilarity.maxsim.value
    if name in _OTHER_SIMILARITIES:
        return TokenSimilarity.maxsim
    try:
        return TokenSimilarity(name)
    except ValueError:
        raise ModelError(f"{path}: similarity_fn_name={name!r:.200}; supported are maxsim and meanmaxsim") from None


def _read_stanford(directory: Path) -> LateInteractionFiles:
    """A directory of Stanford's ColBERT: the projection is stored among the weights of the backbone."""
    path = directory / METADATA
    if path.is_file() and path.stat().st_size > _MAX_METADATA_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size:,} bytes; at most {_MAX_METADATA_BYTES:,} are allowed")
    metadata = _json_if_any(path)
    similarity = metadata.get("similarity") or "cosine"
    if similarity != "cosine":
        raise ModelError(f"{path}: similarity={similarity!r:.200}; supported is cosine")
    tokens = [
        metadata.get(key) or default
        for key, default in (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]"))
    ]
    for token in tokens:
        if not isinstance(token, str) or len(token) > _MAX_CHARACTERS:
            raise ModelError(f"{path}: {token!r:.200} is not a token")
    punctuation = tuple(string.punctuation) if metadata.get("mask_punctuation", True) else ()
    length = _length(path, metadata, "query_maxlen") or DEFAULT_EXPANSION_LENGTH
    attend = bool(metadata.get("attend_to_mask_tokens"))
    return LateInteractionFiles(
        transformer=directory,
        dense=(_stanford_projection(directory),),
        token_vectors=TokenVectors(
            document_length=_length(path, metadata, "doc_maxlen"),
            expansion=Expansion(strategy=QueryExpansion.fixed, length=length, attend=attend),
            skiplist_words=punctuation,
        ),
        prompts=dict(zip(_ROLES, (f"{token} " for token in tokens), strict=True)),
        prompt_tokens=tuple(tokens),
    )


def _stanford_projection(directory: Path) -> DenseSource:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    for path in weight_files(index) if index.is_file() else [single] if single.is_file() else []:
        try:
            with safe_open(path, framework="pt") as file:
                shape = file.get_slice(PROJECTION).get_shape() if PROJECTION in file.keys() else None  # noqa: SIM118
        except Exception as error:  # safetensors does not export its exception type
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
        if shape is not None and len(shape) != 2:
            raise ModelError(f"{path}: {PROJECTION} has the shape {shape}, not [dimensions, hidden size]")
        if shape is not None:
            return DenseSource(
                directory=directory, num_in=shape[1], num_out=shape[0], bias=False, activation=IDENTITY, inline=INLINE
            )
    raise ModelError(
        f"{directory} has no safetensors with {PROJECTION}, the projection of Stanford's ColBERT, and pickles of it "
        "are not read: convert the weights to safetensors"
    )


def why_not_pylate(settings: TokenVectors, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The setting that PyLate does not have; None if it computes the same vectors."""
    expansion = settings.expansion
    if expansion is not None and expansion.strategy is not QueryExpansion.fixed:
        return f"expands queries with the strategy {expansion.strategy.value}"
    default = tokenizer.eos_token if tokenizer.mask_token is None else tokenizer.mask_token
    if expansion is not None and expansion.token not in (None, default):
        return f"expands queries with the token {expansion.token}"
    return "leaves out vectors of queries" if settings.skiplist_queries and settings.skiplist_words else None


def pylate_settings(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase, lengths: Mapping[str, int], words: list[str]
) -> dict[str, Any]:
    """PyLate's settings, from which sentence-transformers makes its own.

    PyLate inserts prefixes always, and the other prompts if it is asked for them by name.
    """
    settings = source.settings
    prefixes = {role: pylate_prefix(tokenizer, source.prompts.get(role, "")) for role in ("query", "document")}
    mean = settings.similarity is TokenSimilarity.meanmaxsim
    return {
        "model_type": PYLATE,
        "prompts": source.prompts | {role: prompt for role, (_, prompt) in prefixes.items()},
        "similarity_fn_name": settings.similarity.value if mean else _MAXSIM,
        **{f"{role}_prefix": prefix for role, (prefix, _) in prefixes.items()},
        **{f"{role}_length": length for role, length in lengths.items()},
        "attend_to_expansion_tokens": settings.expansion is not None and settings.expansion.attend,
        "skiplist_words": words,
        "do_query_expansion": settings.expansion is not None,
    }


def pylate_prefix(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[str, str]:
    """The prefix of PyLate and the prompt after it that give the same ids as a prompt.

    PyLate inserts the id of the prefix after the first token of a text. Without such a token the prefix is empty.
    """
    added = tokenizer.get_added_vocab()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    for token in sorted(filter(prompt.startswith, added), key=len, reverse=True):
        rest = prompt.removeprefix(token)
        for shown in dict.fromkeys(("", rest) if not rest.strip() else (rest,)):
            inserted = [[*ids(shown + text)[:1], added[token], *ids(shown + text)[1:]] for text in _PREFIX_PROBES]
            if (
                inserted
                == [ids(prompt + text) for text in _PREFIX_PROBES]
                == [ids(token + shown + t) for t in _PREFIX_PROBES]
            ):
                return token, shown
    return "", prompt
