"""Checks that reading a model directory reads no other files: no links out of it, no settings that name other files.

Otherwise a model could copy a file of the user's into its vocabulary, which is saved and published with the model.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embedtrain.errors import ModelError

_MAX_BYTES = 128 << 20  # of a file of settings or a vocabulary; about twice the largest tokenizer.json of the Hub
_VOCABULARIES = ("vocab.txt", "merges.txt", "bpe.codes", "*.model", "*.tiktoken", "*.tokenizer", "*.jinja")
# JSON files whose values transformers 5.17 to 5.23 may open as files: settings, and vocabularies of all tokenizers.
_SETTINGS = (
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "processor_config.json",
    "preprocessor_config.json", "chat_template.json", "vocab.json", "vocab-src.json", "vocab-tgt.json",
    "entity_vocab.json", "byte_maps.json", "emoji.json", "normalizer.json", "word_shape.json",
    "word_pronunciation.json",
)  # fmt: skip
# They record where a model was made, often as a path of its author's; transformers replaces them when it reads them.
_RECORDS = {
    "config.json": {"_name_or_path"},
    "tokenizer_config.json": {"name_or_path", "special_tokens_map_file", "tokenizer_file", "added_tokens_file"},
}
# Settings that name files or models, alone or together with another setting. No file that transformers saves has them.
_FORBIDDEN = {
    "config.json": {
        "configuration_files", "transformers_weights", "backbone", "backbone_kwargs", "use_timm_backbone",
        "use_pretrained_backbone",
    },
    "tokenizer_config.json": {"init_inputs", "audio_tokenizer"},
    "special_tokens_map.json": {"init_inputs"},
    "processor_config.json": {"audio_tokenizer"},
    "preprocessor_config.json": {"audio_tokenizer"},
}  # fmt: skip
# The same for settings whose values may be anything but a text: a vocabulary is a dictionary, or the path of one.
_FORBIDDEN_TEXTS = {
    "vocab", "merges", "entity_vocab", "gguf_file", "subfolder", "cache_dir", "mecab_option", "sudachi_config_path",
    "sudachi_resource_dir",
}  # fmt: skip
# In WordPiece the time for a word grows with the cube of this length; 100 by default.
_MAX_WORD = 1000
_MAX_GROWTH = 1000  # of a text in a normalizer: every replacement may multiply its length
_MAX_PATH = 4096  # bytes, of Linux
_TOKENIZER_VERSION = re.compile(r"tokenizer\.[\w.-]+\.json")


def read_json(path: Path, kind: type = dict) -> Any:
    """The content of a JSON file; a ModelError if it is missing, damaged, too large, or not of type `kind`."""
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    _require_bounded_size(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:  # the last for deeply nested brackets
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, kind):
        raise ModelError(f"{path} should contain a {kind.__name__}, not a {type(content).__name__}")
    return content


def json_values(content: Any) -> Iterator[tuple[str, Any]]:
    """Every number, text, true, false and null in a JSON value, with the key of the innermost mapping that it is in."""
    pairs = [("", content)]
    while pairs:
        key, value = pairs.pop()
        if isinstance(value, dict):
            pairs.extend(value.items())
        elif isinstance(value, list):
            pairs.extend((key, part) for part in value)
        else:
            yield key, value


def require_own_files(directory: Path, root: Path | None = None) -> None:
    """Reject links in a model directory to files outside `root`, by default the directory itself.

    In the cache of the Hub, files may be links to its `blobs`.
    """
    roots = _roots(root or directory)
    for folder in (directory, directory / "additional_chat_templates"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            # A link to a folder is harmless until that folder is read, and then its files are checked.
            if (path.is_symlink() or folder != directory) and not path.is_dir():
                _require_inside(path, roots)


def require_own_file(path: Path, root: Path) -> None:
    """Reject a file that is outside the directory `root`, or leads out of it."""
    _require_inside(path, _roots(root))


def require_own_settings(directory: Path) -> None:
    """Reject settings of a model and its tokenizer that name files outside the directory."""
    names = [*_SETTINGS, *sorted(path.name for path in directory.glob("sentence_*_config.json"))]
    for path in [directory / name for name in names]:
        if path.is_file():
            _check_settings(path)
    for pattern in _VOCABULARIES:
        for path in sorted(directory.glob(pattern)):
            if path.is_file():
                _require_bounded_size(path)
    for path in sorted(directory.glob("tokenizer*.json")):
        if path.name != "tokenizer_config.json":
            _check_vocabulary(path)


def _require_inside(path: Path, roots: list[Path]) -> None:
    target = path.resolve()
    if not any(target.is_relative_to(root) for root in roots):
        raise ModelError(f"{path} leads to {target}, outside the model directory: replace it by a copy of that file")


def _require_bounded_size(path: Path) -> None:
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ModelError(f"{path} has {size:,} bytes; at most {_MAX_BYTES:,} are allowed")


def _check_settings(path: Path) -> None:
    content = read_json(path, dict if path.name.endswith("config.json") else object)
    if isinstance(content, str):
        raise ModelError(f"{path} is a text, which may be the path of another file")
    settings = content if isinstance(content, dict) else {}
    for key in sorted(_FORBIDDEN.get(path.name, set()) & set(settings)):
        if settings[key]:
            raise ModelError(f"{path}: {key}={settings[key]!r:.200} may refer to other files or models: remove it")
    for key, text in json_values(content):
        if not isinstance(text, str):
            continue
        if text and key in _FORBIDDEN_TEXTS:
            raise ModelError(f"{path}: {key}={text!r:.200} may refer to a file outside the model: remove it")
        if key not in _RECORDS.get(path.name, set()) and _names_other_file(text, path.parent):
            raise ModelError(f"{path}: {key}={text!r} is a file outside the model directory: remove it")
    for name in settings.get("fast_tokenizer_files") or ():
        if not _TOKENIZER_VERSION.fullmatch(str(name)) and name != "tokenizer.json":
            raise ModelError(f"{path}: fast_tokenizer_files names {name!r:.200}, which is not a file beside it")
    templates = settings.get("chat_template")
    if isinstance(templates, list):
        templates = {str(part.get("name")): None for part in templates if isinstance(part, dict)}
    for name in templates if isinstance(templates, dict) else ():
        if "/" in name or "\\" in name:  # templates are saved as files of these names
            raise ModelError(f"{path}: chat_template has the name {name!r:.200}, which is a path")


def _check_vocabulary(path: Path) -> None:
    """Transformers passes a vocabulary on to classes that accept a path as well."""
    rules = read_json(path)
    model = rules.get("model")
    if not isinstance(model, dict):
        raise ModelError(f"cannot read a tokenizer from {path}: its `model` is not a mapping")
    for key in ("vocab", "merges"):
        if not isinstance(model.get(key), dict | list | None):
            raise ModelError(f"{path}: model.{key}={model[key]!r:.200} is neither a mapping nor a list")
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int) and word > _MAX_WORD:
        raise ModelError(f"{path}: model.max_input_chars_per_word={word}; at most {_MAX_WORD:,} are allowed")
    contents = [
        text for key, text in json_values(rules.get("normalizer")) if key == "content" and isinstance(text, str)
    ]
    if math.prod(max(1, len(text)) for text in contents) > _MAX_GROWTH:
        raise ModelError(
            f"{path}: its normalizer replaces parts of a text by more than {_MAX_GROWTH:,} times their length"
        )


def _roots(directory: Path) -> list[Path]:
    """The folders where files of a model directory may be: itself and, in the cache of the Hub, its blobs."""
    directory = directory.resolve()
    roots = [directory]
    for snapshots in directory.parents:
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            # Of the repository; huggingface_hub 1.33 may share them among repositories.
            roots += [snapshots.parent / "blobs", snapshots.parent.parent / "blobs"]
    return roots


def _names_other_file(text: str, directory: Path) -> bool:
    """Whether opening `text` as a path would read a file outside the directory."""
    if "\0" in text or len(text) > _MAX_PATH:
        return False
    for path in (text, os.path.join(directory, text), os.path.expanduser(text)):
        target = Path(os.path.realpath(path))
        if target.is_relative_to("/proc"):  # also files that do not exist yet
            return True
        try:
            is_file = target.exists() and not target.is_dir()
        except OSError:  # a part of the text is too long for a name, or a folder cannot be read
            is_file = False
        if is_file and not any(target.is_relative_to(root) for root in _roots(directory)):
            return True
    return False
