"""Chat templates, in which sentence-transformers describes how pairs and items with pictures are read.

A template of pairs, with the roles query and document, is rendered as one text, in which a system message, the prompt
of sentence-transformers, may replace the instruction. Reading one finds where the rendered text can be cut so that
parts tokenized on their own give the same tokens; writing one is the inverse.

An item with pictures is the content of a message of the role user, and its prompt a system message: `ItemTemplate`.
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from embedtrain.config.kind_settings import PLAIN_INSTRUCTION, PairTemplate
from embedtrain.data.images.item import Picture
from embedtrain.errors import ModelError
from embedtrain.models.security import BoundExceeded, run_bounded
from embedtrain.utils.formatting import one_line

# Private use characters, which no template contains.
_QUERY, _DOCUMENT, _INSTRUCTIONS = "\ue000", "\ue001", ("\ue002", "\ue003")
# Where tokenizers join a text and what surrounds it.
_TEXTS = ("a", "Is it?", "", " two  words ", "line\n", "\n\n", "用于。", "12", "it's", "x\u0301...", "\t(", "-")
_PAIRS = tuple((query, _TEXTS[(5 * number + 1) % len(_TEXTS)]) for number, query in enumerate(_TEXTS))
_PROBED_INSTRUCTIONS = ("Find it.", "用于 1?")
# What shows that a template reads the content of a message as a list of parts, as in sentence-transformers 6.2.
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
# Of rendering all pairs; of the text of a pair, and of all texts that are tokenized to find where it can be cut.
_RENDER_SECONDS, _MAX_CHARACTERS, _MAX_TOKENIZED = 10, 1 << 14, 5_000_000
_SET_ITEM_TEMPLATE, _SET_PAIR_TEMPLATE = "set model.item_template", "set model.pair_template"
_CUT_TEXT = "its chat template joins texts and what surrounds them into other tokens than ours"

# Items by whose texts what a template writes around them is found: a text, a picture, both. The others have to agree.
_TEXT: tuple[str | None, ...] = (" \ue000\n",)
_PICTURE: tuple[str | None, ...] = (None,)
_BOTH: tuple[str | None, ...] = ("\ue000", None)
_ITEMS = (_TEXT, _PICTURE, _BOTH, (None, " \ue000"), (None, None), ("\ue000 ", None, "\ue001\n"))

# Of `ItemTemplate.of_prefix`; words in capitals are replaced.
_PREFIX = (
    "{% set found = namespace(prompt='', pictures=0) %}{% for message in messages %}"
    "{% set parts = message.content %}"
    "{% if parts is string %}{% set parts = [{'type': 'text', 'text': parts}] %}{% endif %}"
    "{% if message.role == 'system' %}"
    "{% for part in parts %}{% set found.prompt = found.prompt + part.text %}{% endfor %}"
    "{% else %}"
    "{% set pictures = parts | selectattr('type', 'equalto', 'image') | list | length %}"
    "{% if pictures == 0 %}BOS{{ found.prompt }}{% endif %}"
    "{% for part in parts %}{% if part.type == 'image' %}PICTURE{% set found.pictures = found.pictures + 1 %}"
    "{% if found.pictures == pictures %}{{ found.prompt }}{% endif %}{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% if pictures == 0 %}END{% endif %}"
    "{% endif %}{% endfor %}"
)

# The content of a message of a pair, a text or a list of parts; the word in capitals is replaced.
_SHOWN = (
    "{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)

_Render = Callable[[str, str, str | None], str]  # query, document and system message to the text of a pair


class Piece(NamedTuple):
    """A text of an item between two of its pictures, or before or after all of them, and what stands around it."""

    before: str
    text: str
    after: str = ""


@dataclass(frozen=True)
class ItemTemplate:
    """What stands around an item and around its prompt, and in place of a picture.

    Attributes:
        starts: before an item without a prompt that begins with a text, and before one that begins with a picture.
        prompted: likewise with a prompt: the texts before and after it.
        end: after an item.
        picture: in place of a picture, with the token of pictures once.
        special_tokens: whether the tokenizer adds its special tokens to the whole.
        after_pictures: what stands behind the last picture, and before the prompt, which follows it; in an item without
            pictures at its start. None: a prompt stands before the item.
    """

    starts: tuple[str, str]
    prompted: tuple[tuple[str, str], tuple[str, str]]
    end: str
    picture: str
    special_tokens: bool
    after_pictures: str | None = None

    @classmethod
    def of_text(cls, text: str, picture: str, bos_token: str | None) -> "ItemTemplate":
        """That of a text with `{item}` once, and `{prompt}` before it once or not at all."""
        before, _, end = text.partition("{item}")
        first, _, second = before.partition("{prompt}")
        return cls(
            starts=(first + second,) * 2,
            prompted=((first, second),) * 2,
            end=end,
            picture=picture,
            special_tokens=_has_special_tokens(first + second, bos_token),
        )

    @classmethod
    def of_prefix(cls, picture: str, bos_token: str) -> "ItemTemplate":
        """That of PaliGemmaProcessor: a text begins behind the last picture, and a line break ends it."""
        return cls(
            starts=(bos_token,) * 2,
            prompted=((bos_token, ""),) * 2,
            end="\n",
            picture=picture,
            special_tokens=False,
            after_pictures=bos_token,
        )

    def around(self, prompt: str, parts: Sequence[str | Picture]) -> list[Piece | Picture]:
        """The texts and pictures of an item, whose `parts` are without the prompt, and what stands around them."""
        begins_with_picture = bool(parts) and not isinstance(parts[0], str)
        first, second = self.prompted[begins_with_picture]
        start = f"{first}{prompt}{second}" if prompt else self.starts[begins_with_picture]
        last = max((number for number, part in enumerate(parts) if not isinstance(part, str)), default=-1)
        pieces: list[Piece | Picture] = []
        piece = Piece("" if last >= 0 and self.after_pictures is not None else start, "")
        for number, part in enumerate(parts):
            if isinstance(part, str):
                piece = piece._replace(text=part)
            else:
                pieces += [piece, part]
                is_last = number == last and self.after_pictures is not None
                piece = Piece(f"{self.after_pictures}{prompt}" if is_last else "", "")
        return [*pieces, piece._replace(after=self.end)]


def read_item_template(
    tokenizer: PreTrainedTokenizerBase, where: str, picture_token: str, options: Mapping[str, Any]
) -> ItemTemplate:
    """What a tokenizer's chat template writes around items.

    Args:
        where: the directory, for messages.
        picture_token: stands for a picture in what is rendered.
        options: of `apply_chat_template`.

    A ModelError if the template cannot render items with pictures, or writes more than what stands around them.
    """
    prompts = (None, _INSTRUCTIONS[0])

    def render(prompt: str | None, item: Sequence[str | None]) -> str:
        content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in item]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if prompt is not None:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": prompt}]})
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"{len(text):,} characters for a short text; at most {_MAX_CHARACTERS:,} are allowed")
        return text

    def render_all() -> list[list[str] | str]:
        """For each prompt the texts of all items, or what is wrong."""
        answers: list[list[str] | str] = []
        for prompt in prompts:
            try:
                answers.append([render(prompt, item) for item in _ITEMS])
            except MemoryError:
                raise
            except Exception as error:  # a template may raise anything
                answers.append(one_line(error))
        return answers

    try:
        rendered = run_bounded(render_all, _RENDER_SECONDS)
    except BoundExceeded as error:
        raise ModelError(f"{where}: rendering its chat template {error}; {_SET_ITEM_TEMPLATE}") from None
    if isinstance(rendered[0], str):
        raise ModelError(f"{where}: its chat template cannot render a text and a picture ({rendered[0]})")
    plain = dict(zip(_ITEMS, rendered[0], strict=True))
    start, _, end = plain[_TEXT].partition(str(_TEXT[0]))
    picture = plain[_BOTH].removeprefix(f"{start}{_BOTH[0]}").removesuffix(end)
    start_of_picture = plain[_PICTURE].removesuffix(picture + end)
    found = ItemTemplate(
        starts=(start, start_of_picture),
        prompted=((start, ""), (start_of_picture, "")),  # of a template without system messages
        end=end,
        picture=picture,
        special_tokens=_has_special_tokens(start, tokenizer.bos_token),
    )
    if not isinstance(rendered[1], str):
        texts = dict(zip(_ITEMS, rendered[1], strict=True))
        ends = f"{_TEXT[0]}{end}", f"{picture}{end}"
        starts = [text.removesuffix(rest) for text, rest in zip((texts[_TEXT], texts[_PICTURE]), ends, strict=True)]
        first, second = (text.partition(_INSTRUCTIONS[0]) for text in starts)
        found = replace(found, prompted=((first[0], first[2]), (second[0], second[2])))
    for prompt, of_prompt in zip(prompts, rendered, strict=True):
        for item, text in zip(_ITEMS, of_prompt, strict=True) if not isinstance(of_prompt, str) else ():
            parts = [Picture(0, 1, 1) if part is None else part for part in item]
            pieces = found.around(prompt or "", parts)
            if text != "".join(picture if isinstance(piece, Picture) else "".join(piece) for piece in pieces):
                raise ModelError(
                    f"{where}: its chat template changes items otherwise than by what stands around them; "
                    f"{_SET_ITEM_TEMPLATE}"
                )
    if picture.count(picture_token) != 1:
        raise ModelError(f"{where}: its chat template writes {picture!r:.60} for a picture, not {picture_token} once")
    return found


def write_item_template(template: ItemTemplate) -> str:
    """A chat template that writes the same, of a template whose start is that of its prompt, as of `of_text`.

    Of `of_prefix`, it leaves what stands behind pictures to the processor, which adds it to any text with pictures.
    """
    if template.after_pictures is not None:
        texts = {"BOS": template.after_pictures, "PICTURE": template.picture, "END": template.end}
        return reduce(lambda text, name: text.replace(name, _literal(texts[name])), texts, _PREFIX)
    before, after = template.prompted[0]
    content = (
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        f"{{% if part.type == 'image' %}}{_literal(template.picture)}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
        "{% endfor %}{% endif %}"
    )
    parts = (
        _literal(before),
        f"{{% for message in messages if message.role == 'system' %}}{content}{{% endfor %}}",
        _literal(after),
        f"{{% for message in messages if message.role != 'system' %}}{content}{{% endfor %}}",
        _literal(template.end),
    )
    return "".join(parts)


def _has_special_tokens(start: str, bos_token: str | None) -> bool:
    """Whether processors of transformers add special tokens to a text that a chat template begins like this."""
    return not (bos_token and start.startswith(bos_token))


def read_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    structured: bool | None = None,
    instruction: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> PairTemplate:
    """The template of pairs that a tokenizer's chat template renders, with its prompts.

    Args:
        where: the directory, for messages.
        structured: whether contents are lists of parts; None: as sentence-transformers decides.
        instruction: the system message that pairs have; None: there is none.
        options: of `apply_chat_template`.

    A ModelError if the chat template does not render both roles, or cannot be cut into parts with the same tokens.
    """
    render = _renderer(tokenizer, where, structured, dict(options or {}), instruction)
    text = render(_QUERY, _DOCUMENT, instruction)
    if text.count(_QUERY) != 1 or text.count(_DOCUMENT) != 1 or text.index(_QUERY) > text.index(_DOCUMENT):
        raise ModelError(f"{where}: its chat template does not render a message of role query before one of document")
    start, rest = text.split(_QUERY)
    middle, end = rest.split(_DOCUMENT)
    instructed, varies = _instructed_start(render)
    added = [str(token) for token in tokenizer.get_added_vocab()]
    cuts = itertools.product(_starts(start, instructed if varies else None, added), _middles(middle), _ends(end, added))
    for first, second, third in itertools.islice(cuts, _MAX_TOKENIZED // len(text)):
        template = PairTemplate(
            prefix=(start[:first],) if first else (),
            query=("", middle[:second]),
            document=("", end[:third]),
            suffix=(end[third:],) if third < len(end) else (),
            special_tokens=False,
            prompts={"query": start[first:], "document": middle[second:]},
            instruction_format=_format(instructed[0], first) if varies else None,
        )
        if renders_as(template, template.prompts, tokenizer, render, instruction):
            return template
    raise ModelError(f"{where}: {_CUT_TEXT}; set model.pair_template")


def renders_as(
    template: PairTemplate,
    prompts: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    render: _Render,
    instruction: str | None = None,
) -> bool:
    """Whether the tokens of a template's parts are those of the whole text, for pairs of difficult texts."""

    def ids(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    fixed = [[token for text in part for token in ids(text)] for part in (template.prefix, template.suffix)]
    between = [token for text in template.between for token in ids(text)]
    systems: list[str | None] = [instruction]
    if template.instruction_format is not None:
        systems += _PROBED_INSTRUCTIONS
    for system in systems:
        query_prompt = prompts.get("query", "")
        if system is not None and system != instruction and template.instruction_format is not None:
            query_prompt = template.instruction_format.replace("{text}", "").replace("{instruction}", system)
        for query, document in _PAIRS:
            parts = [
                *fixed[0],
                *ids(f"{template.query[0]}{query_prompt}{query}{template.query[1]}"),
                *between,
                *ids(f"{template.document[0]}{prompts.get('document', '')}{document}{template.document[1]}"),
                *fixed[1],
            ]
            if parts != ids(render(query, document, system)):
                return False
    return True


def read_pair_picture(
    tokenizer: PreTrainedTokenizerBase, where: str, picture_token: str, options: Mapping[str, Any]
) -> str:
    """What a tokenizer's chat template of pairs writes for a picture, with `picture_token` once.

    A ModelError if it cannot render pictures among the texts of pairs, or writes them elsewhere.
    """
    query, document = ("\ue004",), ("\ue005",)

    def render(first: Sequence[str | None], second: Sequence[str | None]) -> str:
        messages = [
            {
                "role": role,
                "content": [{"type": "image"} if part is None else {"type": "text", "text": part} for part in item],
            }
            for role, item in (("query", first), ("document", second))
        ]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"{len(text):,} characters for a short pair; at most {_MAX_CHARACTERS:,} are allowed")
        return text

    def render_all() -> list[Any] | str:
        """A pair of texts, and pairs whose query, or whose document, is each of the items; or what is wrong."""
        try:
            pairs = [(render(item, document), render(query, item)) for item in _ITEMS]
            return [render(query, document), pairs]
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            return one_line(error)

    try:
        rendered = run_bounded(render_all, _RENDER_SECONDS)
    except BoundExceeded as error:
        raise ModelError(f"{where}: rendering its chat template {error}; {_SET_PAIR_TEMPLATE}") from None
    if isinstance(rendered, str):
        raise ModelError(f"{where}: its chat template cannot render a picture of a pair ({rendered})")
    plain, pairs = rendered
    alone = dict(zip(_ITEMS, pairs, strict=True))[_PICTURE][0]
    start, _, end = plain.partition(query[0])
    picture: str = alone.removeprefix(start).removesuffix(end)
    for item, texts in zip(_ITEMS, pairs, strict=True):
        written = "".join(picture if part is None else part for part in item)
        if list(texts) != [plain.replace(role, written) for role in (*query, *document)]:
            raise ModelError(
                f"{where}: its chat template writes pictures of a pair elsewhere than between its texts; "
                f"{_SET_PAIR_TEMPLATE}"
            )
    if picture.count(picture_token) != 1:
        raise ModelError(f"{where}: its chat template writes {picture!r:.60} for a picture, not {picture_token} once")
    return picture


def write_chat_template(
    template: PairTemplate,
    prompts: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    special: tuple[Sequence[str], Sequence[str]],
    picture: str | None = None,
) -> str | None:
    """A chat template that renders pairs with these prompts; None if it would give other tokens.

    A system message replaces the instruction within the query's prompt, or else the whole prompt. `special` are the
    special tokens at the beginning and at the end of a pair. With `picture`, what stands for one, contents may be lists
    of texts and pictures.
    """
    prompt, instruction_format = prompts.get("query", ""), template.instruction_format or PLAIN_INSTRUCTION
    before, after = instruction_format.removesuffix("{text}").split("{instruction}")
    if not (prompt.startswith(before) and prompt.endswith(after) and len(prompt) >= len(before + after)):
        before = after = ""
    default = json.dumps(prompt[len(before) : len(prompt) - len(after)], ensure_ascii=False)
    contents = [f"{{{{ {_content('system')} | default({default}) }}}}"]
    contents += [f"{{{{ {_content(role)} }}}}" for role in ("query", "document")]
    shown = ""
    if picture is not None:
        shown = _SHOWN.replace("PICTURE", _literal(picture))
        contents = [f"{{{{ shown({_content(role)}) }}}}" for role in ("system", "query", "document")]
        has_system = f"{{% if {_content('system')} is defined %}}"
        contents[0] = f"{has_system}{contents[0]}{{% else %}}{{{{ {default} }}}}{{% endif %}}"
    parts = (
        shown,
        _literal("".join((*special[0], *template.prefix, template.query[0], before))),
        contents[0],
        _literal(after),
        contents[1],
        _literal("".join((template.query[1], *template.between, template.document[0], prompts.get("document", "")))),
        contents[2],
        _literal("".join((template.document[1], *template.suffix, *special[1]))),
    )
    rendered = copy.deepcopy(tokenizer)
    rendered.chat_template = "".join(parts)
    complete = replace(
        template,
        prefix=(*special[0], *template.prefix),
        suffix=(*template.suffix, *special[1]),
        instruction_format=f"{before}{{instruction}}{after}{{text}}",
    )
    same = all(
        renders_as(complete, prompts, rendered, _renderer(rendered, "the export", structured, {}))
        for structured in (False, *([] if picture is None else [True]))
    )
    return rendered.chat_template if same else None


def _literal(text: str) -> str:
    # JSON, because Jinja drops a line break at the end of a template and interprets braces.
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _content(role: str) -> str:
    return f'(messages | selectattr("role", "eq", "{role}") | map(attribute="content") | first)'


def _renderer(
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    structured: bool | None,
    options: dict[str, Any],
    instruction: str | None = None,
) -> _Render:
    """Looks up the text of a pair that is tried here: one process renders all, because a template may never end."""
    if structured is None:
        written = tokenizer.chat_template
        structured = not isinstance(written, str) or any(part in written for part in _STRUCTURED)

    def render(query: str, document: str, system: str | None) -> tuple[str, bool]:
        """The text, or what is wrong and False."""
        texts = {"query": query, "document": document} | ({} if system is None else {"system": system})
        messages: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": texts[role]}] if structured else texts[role]}
            for role in ("system", "query", "document")
            if role in texts
        ]
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            return one_line(error), False
        if len(text) > _MAX_CHARACTERS:
            return f"{len(text):,} characters for a short pair; at most {_MAX_CHARACTERS:,} are allowed", False
        return text, True

    tried = [(_QUERY, _DOCUMENT, system) for system in (instruction, *_INSTRUCTIONS)]
    tried += [(*pair, system) for pair in _PAIRS for system in (instruction, *_PROBED_INSTRUCTIONS)]
    try:
        rendered = run_bounded(lambda: [render(*key) for key in tried], _RENDER_SECONDS)
    except BoundExceeded as error:
        raise ModelError(
            f"{where}: rendering its chat template {error}; remove the template and set model.pair_template"
        ) from None
    results = dict(zip(tried, rendered, strict=True))

    def look_up(query: str, document: str, system: str | None) -> str:
        text, is_rendered = results[query, document, system]
        if not is_rendered:
            raise ModelError(
                f"{where}: its chat template cannot render messages of the roles query and document ({text})"
            )
        return str(text)

    return look_up


def _instructed_start(render: _Render) -> tuple[list[str], bool]:
    """What precedes the query with two instructions, and whether these are part of it."""
    try:
        starts = [render(_QUERY, _DOCUMENT, text).partition(_QUERY)[0] for text in _INSTRUCTIONS]
    except ModelError:  # some templates have no system messages
        return ["", ""], False
    contained = all(text in start for text, start in zip(_INSTRUCTIONS, starts, strict=True))
    same = contained and starts[0].replace(_INSTRUCTIONS[0], "") == starts[1].replace(_INSTRUCTIONS[1], "")
    return starts, same and starts[0].count(_INSTRUCTIONS[0]) == 1


def _format(instructed: str, first: int) -> str:
    return instructed[first:].replace(_INSTRUCTIONS[0], "{instruction}") + "{text}"


def _starts(start: str, instructed: list[str] | None, added: list[str]) -> Iterator[int]:
    """Where the prompt of the query may begin: at the instruction, at its line, or after the last special token."""
    if instructed is not None:
        index = min(instructed[0].index(_INSTRUCTIONS[0]), len(start))
        yield from dict.fromkeys((index, start.rfind("\n", 0, index) + 1))
    else:
        yield max((start.rfind(token) + len(token) for token in added if token in start), default=0)
    yield 0


def _middles(middle: str) -> Iterator[int]:
    """Where the prompt of the document may begin: after a line break, or anywhere."""
    lines = [number + 1 for number, character in enumerate(middle) if character == "\n"]
    yield from dict.fromkeys((*reversed(lines), *range(len(middle) + 1)))


def _ends(end: str, added: list[str]) -> Iterator[int]:
    """Where the suffix, which is never cut, may begin: at once, at a special token, or after a line break."""
    special = [end.index(token) for token in added if token in end]
    lines = [number + 1 for number, character in enumerate(end) if character == "\n"]
    yield from dict.fromkeys((0, *sorted(special)[:1], *(number for number in lines if number < len(end))))
