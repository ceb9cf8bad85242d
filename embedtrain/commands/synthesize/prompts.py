"""Prompts of language models, each a template in a file, and their answers, which are JSON that may be damaged.

A template has the blocks `system` and `user`, whose texts are the messages. A user's folder of templates comes before
the package's: a file of the same name replaces one, a file of another name is a kind of query of its own.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader, StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from embedtrain.commands.synthesize.types import Message, Role
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import one_line

_FOLDER = Path(__file__).with_name("prompts")
_SUFFIX = ".jinja"
_ROLES: tuple[Role, ...] = ("system", "user")
_MAX_CHARACTERS = 4_000_000  # of a rendered message: a loop that never ends in practice
_RENDER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class QueryKind:
    """What a kind of query needs besides a document."""

    num_documents: int = 1
    has_language: bool = False  # it is in one of `queries.languages`
    has_instruction: bool = False


# The kinds whose templates the package has. Those of a user's folder are as the first one.
QUERY_KINDS = {
    "question": QueryKind(),
    "keywords": QueryKind(),
    "sentence": QueryKind(),
    "title": QueryKind(),
    "cross_lingual": QueryKind(has_language=True),
    "multi_hop": QueryKind(num_documents=2),
    "instruction": QueryKind(has_instruction=True),
}
JUDGE, PARAPHRASE, NEGATIVES = "judge", "paraphrase", "negatives"
_OTHERS = (JUDGE, PARAPHRASE, NEGATIVES)

# English names by ISO 639-1 code, which language models know better than codes.
_LANGUAGES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "bn": "Bengali",
    "ca": "Catalan",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "nl": "Dutch",
    "no": "Norwegian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sr": "Serbian",
    "sv": "Swedish",
    "sw": "Swahili",
    "ta": "Tamil",
    "te": "Telugu",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "zh": "Chinese",
}


def language_name(code: str) -> str:
    """What a prompt calls a language."""
    return _LANGUAGES.get(code, f"the language with the ISO 639-1 code {code}")


class Prompts:
    """The templates by name: kinds of queries, `judge`, `paraphrase` and `negatives`; `folder` is the user's.

    Raises ConfigError for a folder that does not exist, or a file in it that is no template or is not used: files whose
    names begin with `_` are for other templates, and others have the name of one of the package or of one of `kinds`.
    """

    def __init__(self, folder: str | None, kinds: Sequence[str] = ()) -> None:
        self._option = f"prompts={folder}"
        folders = [_FOLDER]
        if folder is not None:
            folders.insert(0, expand_user(folder))
            self._check_folder(folders[0], kinds)
        self._is_own = folder is not None
        self._environment = ImmutableSandboxedEnvironment(
            loader=ChoiceLoader([FileSystemLoader(each) for each in folders]),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._digests: dict[str, str] = {}

    def _check_folder(self, folder: Path, kinds: Sequence[str]) -> None:
        names = sorted(path.stem for path in folder.glob(f"*{_SUFFIX}"))
        if not names:
            raise ConfigError(f"{self._option}: there is no file NAME{_SUFFIX} in this folder")
        known = (*QUERY_KINDS, *_OTHERS, *kinds)
        for name in names:
            if name not in known and not name.startswith("_"):
                raise ConfigError(
                    f"{self._option}: {name}{_SUFFIX} is not used: names are {', '.join((*QUERY_KINDS, *_OTHERS))}, "
                    f"and those of kinds of your own, which queries.kinds has ({', '.join(kinds)})"
                )

    @cached_property
    def names(self) -> list[str]:
        """The templates that can be rendered."""
        names = self._environment.list_templates(extensions=[_SUFFIX.removeprefix(".")])
        return sorted(name.removesuffix(_SUFFIX) for name in names if not name.startswith("_") and "/" not in name)

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of queries."""
        return [name for name in self.names if name not in _OTHERS]

    def digest(self, name: str) -> str:
        """The first 12 hex digits of the SHA-256 of a template and those that it is made of."""
        if name not in self._digests:
            content = "".join(self._sources(name + _SUFFIX))
            self._digests[name] = hashlib.sha256(content.encode()).hexdigest()[:12]
        return self._digests[name]

    def _sources(self, file: str, seen: tuple[str, ...] = ()) -> Iterator[str]:
        loader = self._environment.loader
        assert loader is not None
        source = loader.get_source(self._environment, file)[0]
        yield source
        for other in meta.find_referenced_templates(self._environment.parse(source)):
            if other is not None and other not in (file, *seen):
                yield from self._sources(other, (file, *seen))

    def render(self, name: str, **values: Any) -> tuple[Message, ...]:
        """The messages of a prompt. A ConfigError if the template cannot be rendered, or renders no message."""
        try:
            messages = tuple(self._messages(self._environment.get_template(name + _SUFFIX), values))
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            raise ConfigError(f"{self._option}: {error.name}:{error.lineno}: {error.message}") from None
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"{self._option}: {name}{_SUFFIX}: {one_line(error)}") from None
        if not messages or messages[-1].role != "user":
            raise ConfigError(f"{self._option}: {name}{_SUFFIX} has no text in its block `user`")
        return messages

    def _messages(self, template: Template, values: Mapping[str, Any]) -> Iterator[Message]:
        # The blocks of a template that extends another one are known when its root has been rendered.
        context = template.new_context(dict(values))
        for _ in template.root_render_func(context):
            pass
        for role in _ROLES:
            blocks = context.blocks.get(role)
            text = "".join(blocks[0](context)).strip() if blocks else ""
            if len(text) > _MAX_CHARACTERS:
                raise ValueError(f"renders {len(text):,} characters; at most {_MAX_CHARACTERS:,} are allowed")
            if text:
                yield Message(role, text)

    def require_usable(self, name: str, values: Mapping[str, Any]) -> None:
        """Render a template that may be the user's, in a process that is ended if it does not come to an end.

        Raises ConfigError if it cannot be rendered.
        """
        from embedtrain.models.security import BoundExceeded, run_bounded

        if not self._is_own:
            return

        def render() -> str:
            try:
                self.render(name, **values)
            except ConfigError as error:
                return str(error)
            return ""

        try:
            problem = run_bounded(render, _RENDER_SECONDS)
        except BoundExceeded as error:
            raise ConfigError(f"{self._option}: rendering {name}{_SUFFIX} {error}") from None
        if problem:
            raise ConfigError(problem)


def queries_schema(count: int, *, has_instruction: bool = False) -> dict[str, Any]:
    """The JSON schema of the answer of a prompt for queries."""
    item: dict[str, Any] = {"type": "string"}
    if has_instruction:
        item = _object(instruction=item, query=item)
    return _object(queries=_array(item, count))


def documents_schema(count: int) -> dict[str, Any]:
    """The JSON schema of the answer of the prompt `negatives`."""
    return _object(documents=_array({"type": "string"}, count))


def _array(item: dict[str, Any], count: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": count, "maxItems": count}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


# Of the prompt `judge`: the reason comes first, so that the grade follows from it.
JUDGE_SCHEMA = _object(reason={"type": "string"}, grade={"type": "integer", "minimum": 1, "maximum": 5})


@dataclass(frozen=True, slots=True)
class Parsed:
    """The JSON value of an answer, and whether it had to be repaired."""

    value: Any
    is_repaired: bool


_THOUGHT = re.compile(r"^.*</think(?:ing)?>|<think(?:ing)?>.*$", re.DOTALL)
_FENCE = re.compile(r"```[\w-]*\n(.*?)(?:```|$)", re.DOTALL)
_ITEM = re.compile(r"^\s*(?:\d{1,3}[.):]|[-*\u2022])\s+(.*\S)\s*$", re.MULTILINE)


def parse_answer(text: str) -> Parsed | None:
    """The object or list in an answer; None if there is none.

    JSON that is whole is read as it is. Else the usual damage is repaired: thoughts before the answer, a fence around
    it, text before and after, missing brackets and commas, other quotation marks, and a numbered list in place of JSON.
    """
    from json_repair import repair_json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        return Parsed(_writable(value), is_repaired=False) if isinstance(value, dict | list) else None
    text = _THOUGHT.sub("", text)
    fenced = _FENCE.search(text)
    text = text if fenced is None else fenced[1]
    start = min((index for bracket in "{[" if (index := text.find(bracket)) >= 0), default=-1)
    if start < 0:
        items = _ITEM.findall(text)
        return Parsed(items, is_repaired=True) if items else None
    try:
        value = repair_json(text[start:], return_objects=True)
    except Exception:  # a library that guesses may raise anything
        return None
    return Parsed(_writable(value), is_repaired=True) if isinstance(value, dict | list) and value else None


def _writable(value: Any) -> Any:
    """The value without halves of characters, which JSON can spell and no file can have."""
    match value:
        case str():
            return value.encode("utf-8", "ignore").decode()
        case dict():
            return {_writable(str(key)): _writable(item) for key, item in value.items()}
        case list():
            return [_writable(item) for item in value]
        case _:
            return value


def texts_in(value: Any, *names: str) -> list[Any]:
    """The list of an answer: that of the first of these keys, or of any key, the answer itself, or its only text."""
    if isinstance(value, list):
        return value
    for name in names:
        if name in value:
            found = value[name]
            return found if isinstance(found, list) else [found]
    lists = [item for item in value.values() if isinstance(item, list)]
    return lists[0] if len(lists) == 1 else [value]
