"""Leaves tokens out of the files of a tokenizer, so that texts of the remaining tokens are tokenized as before.

WordPiece takes the longest token that matches, and Unigram the most probable path: both still do if all tokens of the
result are kept. Unigram derives the score of unknown characters from the lowest score, so that token is kept. BPE
needs every intermediate token of the merges that lead to a token, and keeps the order of the merges.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from embedtrain.errors import ConfigError

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
KINDS = ("WordPiece", "WordLevel", "Unigram", "BPE")


def required_tokens(tokenizer: Mapping[str, Any]) -> set[int]:
    """The ids that are kept whatever a corpus has: special and added tokens, bytes, and the unknown token.

    `tokenizer` is the content of tokenizer.json.
    """
    model = tokenizer["model"]
    ids = {int(token["id"]) for token in tokenizer.get("added_tokens", ())}
    if model["type"] == "Unigram":
        entries = model["vocab"]
        ids |= {index for index, (token, _) in enumerate(entries) if token in _BYTE_TOKENS}
        ids |= {min(range(len(entries)), key=lambda index: entries[index][1])}
        ids |= {model["unk_id"]} - {None}
    else:
        vocabulary = model["vocab"]
        ids |= {vocabulary[token] for token in (*_BYTE_TOKENS, model.get("unk_token")) if token in vocabulary}
        if model["type"] == "BPE":  # the characters that stand for bytes, or the alphabet
            ids |= {index for token, index in vocabulary.items() if len(token) == 1}
    return ids


def with_parts(tokenizer: Mapping[str, Any], kept: set[int]) -> set[int]:
    """The ids to keep, and for BPE those of all tokens from which merges make them."""
    model = tokenizer["model"]
    if model["type"] != "BPE":
        return kept
    vocabulary, sources = model["vocab"], dict[str, list[tuple[str, str]]]()
    for first, second in merges_of(model):
        sources.setdefault(first + second, []).append((first, second))
    token_of = {index: token for token, index in vocabulary.items()}
    closed, waiting = set(kept), [token_of[index] for index in kept if index in token_of]
    while waiting:
        for part in {part for pair in sources.get(waiting.pop(), ()) for part in pair}:
            if vocabulary[part] not in closed:
                closed.add(vocabulary[part])
                waiting.append(part)
    return closed


def merges_of(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE model, which newer files store as pairs and older ones as one text."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def trim_tokenizer(tokenizer: Mapping[str, Any], new_id: Mapping[int, int]) -> dict[str, Any]:
    """The content of tokenizer.json with the tokens in `new_id`, whose numbers keep their order."""
    trimmed: dict[str, Any] = json.loads(json.dumps(tokenizer))
    model = trimmed["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for index, entry in enumerate(model["vocab"]) if index in new_id]
        if model["unk_id"] is not None:
            model["unk_id"] = new_id[model["unk_id"]]
    else:
        model["vocab"] = {token: new_id[index] for token, index in model["vocab"].items() if index in new_id}
    if model["type"] == "BPE":
        kept = model["vocab"]
        merges = zip(tokenizer["model"]["merges"], merges_of(tokenizer["model"]), strict=True)
        model["merges"] = [
            merge for merge, (first, second) in merges if first in kept and second in kept and first + second in kept
        ]
    for token in trimmed.get("added_tokens", ()):
        token["id"] = new_id[token["id"]]
    if trimmed.get("padding"):
        trimmed["padding"]["pad_id"] = new_id[trimmed["padding"]["pad_id"]]
    _renumber_processor(trimmed.get("post_processor"), new_id)
    return trimmed


def _renumber_processor(processor: Any, new_id: Mapping[int, int]) -> None:
    if not processor:
        return
    match processor["type"]:
        case "Sequence":
            for part in processor["processors"]:
                _renumber_processor(part, new_id)
        case "TemplateProcessing":
            for token in processor["special_tokens"].values():
                token["ids"] = [new_id[index] for index in token["ids"]]
        case "BertProcessing" | "RobertaProcessing":
            for name in ("sep", "cls"):
                token, index = processor[name]
                processor[name] = [token, new_id[index]]
        case "ByteLevel":
            pass
        case kind:
            raise ConfigError(f"the tokenizer has a post-processor {kind}, whose ids cannot be changed")


def trim_files(directory: Path, trim: Callable[[dict[str, Any]], dict[str, Any]], new_id: Mapping[int, int]) -> None:
    """Replace the files of a tokenizer that `save_pretrained` wrote; `trim` gets the content of tokenizer.json."""
    for path in directory.iterdir():
        if path.is_file() and path.name not in _FILES:
            path.unlink()  # vocabularies of slow tokenizers, which would be read instead
    path = directory / "tokenizer.json"
    trimmed = trim(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(trimmed, ensure_ascii=False), encoding="utf-8")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if added := config.get("added_tokens_decoder"):
        config["added_tokens_decoder"] = {str(new_id[int(index)]): token for index, token in added.items()}
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def renumber_config(config: Any, new_id: Mapping[int, int]) -> None:
    """Replace the numbers of tokens in a model's configuration."""
    for name, value in config.to_dict().items():
        if name.endswith("_token_id"):
            setattr(config, name, _renumbered(value, new_id))
    config.vocab_size = len(new_id)


def _renumbered(value: Any, new_id: Mapping[int, int]) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [new_id[index] for index in value if index in new_id]
    return new_id.get(value) if isinstance(value, int) else value
