"""Chat templates with the roles query and document, in which sentence-transformers describes how pairs are read.

A template is rendered as one text, in which a system message, the prompt of sentence-transformers, may replace the
instruction. Reading one finds where the rendered text can be cut so that parts tokenized on their own give the same
tokens; writing one is the inverse.
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from embedtrain.config.kind_settings import PLAIN_INSTRUCTION, PairTemplate
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
_CUT_TEXT = "its chat template joins texts and what surrounds them into other tokens than ours"

_Render = Callable[[str, str, str | None], str]  # query, document and system message to the text of a pair


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


def write_chat_template(
    template: PairTemplate,
    prompts: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    special: tuple[Sequence[str], Sequence[str]],
) -> str | None:
    """A chat template that renders pairs with these prompts; None if it would give other tokens.

    A system message replaces the instruction within the query's prompt, or else the whole prompt. `special` are the
    special tokens at the beginning and at the end of a pair.
    """
    prompt, instruction_format = prompts.get("query", ""), template.instruction_format or PLAIN_INSTRUCTION
    before, after = instruction_format.removesuffix("{text}").split("{instruction}")
    if not (prompt.startswith(before) and prompt.endswith(after) and len(prompt) >= len(before + after)):
        before = after = ""
    default = json.dumps(prompt[len(before) : len(prompt) - len(after)], ensure_ascii=False)
    parts = (
        _literal("".join((*special[0], *template.prefix, template.query[0], before))),
        f"{{{{ {_content('system')} | default({default}) }}}}",
        _literal(after),
        f"{{{{ {_content('query')} }}}}",
        _literal("".join((template.query[1], *template.between, template.document[0], prompts.get("document", "")))),
        f"{{{{ {_content('document')} }}}}",
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
    same = renders_as(complete, prompts, rendered, _renderer(rendered, "the export", False, {}))
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
