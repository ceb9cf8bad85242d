"""Checks of single values of a row (texts, scores, ids, labels, vectors), and how messages show a value."""

import ast
import json
import math
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import TypeGuard, TypeVar

import numpy as np

from embedtrain.data.images.item import described, join_chunks
from embedtrain.utils.formatting import format_count

T = TypeVar("T")

MAX_NUMBER = float(np.finfo(np.float32).max)  # scores and vectors are stored in float32


_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")  # or a decimal comma: which one, nobody can say
_TRUTH_VALUES = {"true": True, "false": False}

MAX_COLUMNS = 10_000  # of a row; for a hundred thousand, layouts and pyarrow take minutes


class BadRow(Exception):
    """A row that cannot be used. The text gives the reason without the location."""


class PictureValue(ABC):
    """A picture that a row names or holds. Its header is read where the value is used, and nowhere else."""

    is_url = False  # never a text, and never read

    @abstractmethod
    def read(self, name: str) -> str:
        """The part of an item that stands for it; `name` is that of the value. Raises BadRow if it cannot be used."""

    @property
    @abstractmethod
    def version(self) -> object:
        """What changes with the picture, as JSON, known without reading it."""

    @abstractmethod
    def __repr__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file in a tar file: where its bytes are, and its name."""

    file: str
    offset: int
    length: int
    name: str


# Lists and objects in each other in which pictures are looked for. No layout reads a text or picture further inside,
# and a file may nest them as deep as recursion in Python goes.
MAX_DEPTH = 32


def picture_values(value: object, depth: int = 0) -> Iterator[PictureValue]:
    """The pictures of a value, in order."""
    if isinstance(value, PictureValue):
        yield value
    elif isinstance(value, dict | list) and depth < MAX_DEPTH:
        for element in value.values() if isinstance(value, dict) else value:
            yield from picture_values(element, depth + 1)


def pictures_beside(row: dict[str, object], text_keys: Sequence[str | None]) -> dict[str, list[PictureValue]]:
    """The pictures of a document or query in other columns than its texts; beside a text, links count as not used."""
    found = {key: list(picture_values(value)) for key, value in row.items() if key not in text_keys}
    has_text = any(key in row for key in text_keys)
    return {key: of for key, of in found.items() if of and not (has_text and any(value.is_url for value in of))}


def read_pictures(pictures: dict[str, list[PictureValue]]) -> str:
    """The item of pictures by column. Raises BadRow if one cannot be used."""
    return "".join(picture.read(f'"{key}"') for key, of in pictures.items() for picture in of)


# What messages show.


def not_utf8(data: bytes, position: int) -> str:
    """The message about a byte that is not UTF-8, with the text around it."""
    context = data[max(0, position - 20) : position + 20].decode("utf-8", "surrogateescape").strip()
    shown = shorten(context).replace("\\udc", "\\x")  # Python's notation of a byte outside of any character
    problem = f"not UTF-8 (byte 0x{data[position]:02x} in {shown}): save the file as UTF-8"
    try:
        windows = shorten(data[max(0, position - 8) : position + 8].decode("cp1252").strip())
    except UnicodeDecodeError:
        return problem
    return f"{problem}; if {windows} is meant: iconv -f CP1252 -t UTF-8 FILE > OTHER"


def json_problem(error: json.JSONDecodeError) -> str:
    """The reason that the JSON parser gives, without the position."""
    return error.msg.removesuffix(" at").removesuffix(" starting")


def list_names(names: Iterable[object]) -> str:
    """The first names of columns or keys, of which a file may have a hundred thousand."""
    first = [str(name)[:100] for name in islice(names, 51)]
    return ", ".join([*first[:50], "..."] if len(first) > 50 else first) or "nothing"


def shorten(value: object, length: int = 60) -> str:
    """A value on one line, cut off after `length` characters."""
    value = described(value) if isinstance(value, str) else value
    try:
        text = repr(value[: length + 1] if isinstance(value, str | bytes | list) else value)
    except (RecursionError, ValueError):  # nested a thousand times, or a number of thousands of digits
        return f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= length + 2 else text[:length] + "..."


def describe_value(value: object) -> str:
    """The type of a value in JSON's words, and the shortened value."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"a truth value ({value})"
        case int() | float():
            return f"a number ({shorten(value)})"
        case str():
            return f"a text ({shorten(value)})"
        case list():
            return f"a list ({shorten(value)})"
        case dict():
            return f"an object ({shorten(value)})"
        case bytes():
            return f"binary data ({shorten(value)})"
        case PictureValue():
            return f"a picture ({shorten(value)})"
        case _:
            return f"{type(value).__name__} ({shorten(value)})"


def describe_error(error: BaseException, length: int = 300) -> str:
    """An exception of another library on one line: its type and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:length]}" if text else type(error).__name__


# Checks. `name` says in messages which value it is.


def string(value: object, name: str) -> str:
    """A text, which may be empty, or a picture; of an object with texts and pictures, the item of these."""
    if isinstance(value, str):  # most values
        pass
    elif isinstance(value, dict):
        return text_of(value, name)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and "type" in value[0]:
        return content_item(value, name)
    elif isinstance(value, PictureValue):
        return value.read(name)
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        hint = ": write it as a text, in quotation marks" if is_number else ""
        if isinstance(value, bytes):
            hint = ": if these are pictures, write image_columns, a list with this column, beside the path of the data"
        if isinstance(value, float) and math.isnan(value):
            hint = ", which stands for a missing value: remove the row, or fill it (pandas: dropna, fillna)"
        raise BadRow(f"{name} must be a text, not {describe_value(value)}{hint}")
    # JSON can spell half of a surrogate pair. Tokenizers fail on it with a message about argument types.
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            context = value[max(0, error.start - 10) : error.start + 10]
            raise BadRow(f"{name} holds half a character (a lone surrogate): {shorten(context)}") from None
    return value


def optional_string(value: object, name: str) -> str:
    """A text, or null for an empty one."""
    return "" if value is None else string(value, name)


def text(value: object, name: str) -> str:
    """A text that is not empty."""
    checked = string(value, name)
    if not checked.strip():
        raise BadRow(f"{name} is an empty text")
    return checked


def texts(value: object, name: str) -> list[str]:
    """A text, or a list of texts; each may be an object with a text."""
    if isinstance(value, dict):
        value = objects_in(value)
    return text_list(value, name) if isinstance(value, list) else [text(value, name)]


def text_list(value: object, name: str) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list):
        hint = ": put it in brackets" if isinstance(value, str) else ""
        raise BadRow(f"{name} must be a list of texts, not {describe_value(value)}{hint}")
    return [text(element, f"element {i} of {name}") for i, element in enumerate(value, 1)]


def text_with_instruction(value: object, name: str) -> tuple[str | None, str]:
    """A text, or [instruction, text]; the instruction "" means none."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and not isinstance(value[1], list):
        return string(value[0], name), text(value[1], name)
    return None, text(value, name)


def is_text_pair(value: object) -> TypeGuard[list[str]]:
    """Whether a value is a list of two texts."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(element, str) for element in value)


def instruction(value: object, name: str) -> str | None:
    """An instruction: a text, "" for none at all; None for null."""
    return None if value is None else string(value, name)


# Objects with a text: passages of DPR, SimLM, MS MARCO and others.


# Keys of the text of a document, in the order in which they are looked for.
TEXT_KEYS = (
    *("text", "document_text", "contents", "passage", "content", "document", "body", "abstract", "chunk"),
    *("passage_text", "doc"),
)
# Keys that say whether an object is a positive.
_MARK_KEYS = ("is_selected", "is_relevant", "is_positive", "relevant", "label", "has_answer")


def holds_text(value: object) -> bool:
    """Whether a value is a text, a picture in a file, or an object with one of these."""
    if isinstance(value, dict):
        value = objects_in(value)
        value = value[0] if isinstance(value, list) and value else value
    if isinstance(value, dict) and "role" not in value and (is_chunked(value) or any(_pictures_of_object(value))):
        return True
    if isinstance(value, PictureValue):
        return not value.is_url
    return isinstance(value, str) or (isinstance(value, dict) and "role" not in value and _text_key(value) is not None)


def without_text(value: dict[str, object]) -> str:
    """What is wrong with an object that `holds_text` denies."""
    if "role" in value:
        return (
            "holds messages of a conversation, of which the texts are not known: write the texts, or ms-swift's "
            '"messages", "positive_messages" and "negative_messages"'
        )
    return f"holds objects without a text (they have: {list_names(value)}): write texts, or objects with a text"


def text_of(value: dict[str, object], name: str) -> str:
    """The title and the text of an object, joined as Tevatron and BEIR do, after its pictures.

    Of `{"chunks", "chunk"}`, the item of a document in chunks, whose first one begins with the title.
    """
    if "role" not in value and is_chunked(value):
        return _chunked(value, name)
    key = None if "role" in value else _text_key(value)
    pictures = [] if "role" in value else list(_pictures_of_object(value))
    for other in ("image", "images"):
        if value.get(other) and not any(picture_values(value[other])):  # a text alone would be another item
            raise BadRow(f'"{other}" of {name} must be the name of a picture, not {describe_value(value[other])}')
    if pictures:
        rest = {other: element for other, element in value.items() if not any(picture_values(element))}
        words = text_of(rest, name) if _text_key(rest) is not None else ""
        return "".join(picture.read(name) for picture in pictures) + words
    if key is None:
        raise BadRow(f"{name} {without_text(value)}")
    if isinstance(value[key], list):
        return content_item(value[key], name)
    title, text = (optional_string(value.get(part), f'"{part}" of {name}') for part in ("title", key))
    return (text if key == "title" else f"{title} {text}").strip()


def is_chunked(value: dict[str, object]) -> bool:
    """Whether an object is a document in chunks."""
    return isinstance(value.get("chunks"), list)


def _chunked(value: dict[str, object], name: str) -> str:
    """The document of an object with `chunks`, and in `chunk` the number, or numbers, of those that answer."""
    chunks = text_list(value["chunks"], f'"chunks" of {name}')
    if not chunks:
        raise BadRow(f'"chunks" of {name} is an empty list')
    title = optional_string(value.get("title"), f'"title" of {name}')
    chunks[0] = f"{title} {chunks[0]}" if title else chunks[0]
    numbers = value.get("chunk")
    answers = list[int]()
    for number in [] if numbers is None else numbers if isinstance(numbers, list) else [numbers]:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(chunks):
            raise BadRow(
                f'"chunk" of {name} must be the number of one of its {len(chunks)} chunks, from 0 to '
                f"{len(chunks) - 1}, not {describe_value(number)}"
            )
        answers.append(number)
    return join_chunks(chunks, answers)


def content_item(value: object, name: str) -> str:
    """The item of a message's content in parts: `{"type": "text", "text"}` and `{"type": "image", "image"}`."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name} must be a text, or a list of parts with a type, not {describe_value(value)}")
    items: list[str] = []
    for i, part in enumerate(value, 1):
        location = f"part {i} of {name}"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            items.append(string(part["text"], location))
        elif kind in ("image", "image_url") and any(pictures := list(picture_values(part))):
            items += [picture.read(location) for picture in pictures]
        else:
            raise BadRow(f"{location} must be a text or an image, not {describe_value(part)}")
    return "".join(items)


def with_pictures(text: str, pictures: Sequence[PictureValue], mark: str, name: str) -> str:
    """The item of a text and its pictures, which stand where it has the mark, else before it."""
    items = [picture.read(name) for picture in pictures]
    texts = text.split(mark) if pictures else [text]
    if len(texts) == 1:
        return "".join(items) + text
    if len(texts) != len(items) + 1:
        raise BadRow(f"{name} has {mark} {len(texts) - 1} times, and {format_count(len(items), 'picture')}")
    return "".join(part for pair in zip(texts, [*items, ""], strict=True) for part in pair)


def _pictures_of_object(value: dict[str, object]) -> Iterator[PictureValue]:
    """The pictures that are values of an object, alone, in lists, or as `{"url": ...}`; not of other objects in it."""
    for element in value.values():
        for picture in element if isinstance(element, list) else [element]:
            if isinstance(picture, dict) and len(picture) == 1:
                (picture,) = picture.values()  # noqa: PLW2901
            if isinstance(picture, PictureValue):
                yield picture


def _text_key(value: dict[str, object]) -> str | None:
    return next((key for key in TEXT_KEYS if value.get(key) is not None), "title" if "title" in value else None)


def objects_in(value: dict[str, object]) -> object:
    """The objects whose values an object has as lists of one length, as `datasets` stores them; else the object."""
    lists = {key: element for key, element in value.items() if isinstance(element, list)}
    lengths = {len(element) for element in lists.values()}
    if not lists or len(lengths) != 1 or not any(key in lists for key in TEXT_KEYS):
        return value
    return [{key: element[i] for key, element in lists.items()} for i in range(lengths.pop())]


def marks_of(value: object, name: str) -> list[bool] | None:
    """For each object of a list, whether it is marked as a positive; None where objects have no such mark."""
    if isinstance(value, dict):
        value = objects_in(value)
    if not isinstance(value, list) or not value or not all(isinstance(element, dict) for element in value):
        return None
    key = next((key for key in _MARK_KEYS if key in value[0]), None)
    if key is None:
        return None
    return positive_marks([element.get(key) for element in value], f'"{key}" of {name}', len(value))


# Lists in cells of CSV and TSV files, as pandas and json write them.


_QUOTED = r"""(?:'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""
_LIST_CELL = re.compile(rf"\s*\[\s*(?:{_QUOTED}(?:\s*,\s*{_QUOTED})*\s*,?\s*)?\]\s*", re.DOTALL)
_LIKE_LIST = re.compile(r"""\s*\[\s*['"].*['"]\s*\]\s*""", re.DOTALL)


def list_in_cell(cell: str) -> object:
    """The list of texts that a cell holds in JSON's or Python's form, else the cell.

    Raises BadRow for a cell that looks like such a list and is none: numpy writes no commas between texts.
    """
    if not cell.lstrip().startswith("["):
        return cell
    try:
        parsed = json.loads(cell)
    except (ValueError, RecursionError):
        parsed = None
    if parsed is None and _LIST_CELL.fullmatch(cell):
        try:
            parsed = ast.literal_eval(cell.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            parsed = None
    if isinstance(parsed, list) and all(isinstance(element, str | dict) for element in parsed):
        return parsed
    if parsed is None and _LIKE_LIST.fullmatch(cell):
        raise BadRow(
            f"{shorten(cell)} looks like a list of texts and is none, in JSON's form or Python's: write "
            '["first text", "second text"], or the texts in columns of their own'
        )
    return cell


def one_per_text(value: object, name: str, texts_name: str, count: int, check: Callable[[object, str], T]) -> list[T]:
    """A list with one element for each of `count` texts, each checked with `check`."""
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list, one element for each text of {texts_name}, not {describe_value(value)}")
    if len(value) != count:
        elements, expected = format_count(len(value), "element"), format_count(count, "text")
        raise BadRow(f"{name} has {elements} and {texts_name} has {expected}: give one for each")
    return [check(element, f"element {i} of {name}") for i, element in enumerate(value, 1)]


def identifier(value: object, name: str) -> str:
    """An id, a text or a whole number; "" for null."""
    if value is None:
        return ""
    if isinstance(value, str):
        if "\0" in value:  # it ends a text in C: trec_eval would take "a\0b" and "a" for the same id
            raise BadRow(f"{name} holds a NUL character: {shorten(value)}")
        return string(value, name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Decimal) and value == value.to_integral_value():  # whole numbers of databases in Parquet
        return str(int(value))
    raise BadRow(f"{name} must be an id, a text or a whole number, not {describe_value(value)}")


def number(value: object, name: str) -> float:
    """A finite number; a truth value is 1 or 0."""
    if not isinstance(value, int | float | Decimal):
        is_unclear = isinstance(value, str) and _THOUSANDS.fullmatch(value.strip())
        hint = ": write a decimal point, or no separator of thousands" if is_unclear else ""
        raise BadRow(f"{name} must be a number, not {describe_value(value)}{hint}")
    value = float(value) if isinstance(value, Decimal) else value
    if not abs(value) <= MAX_NUMBER:
        raise BadRow(f"{name} must be a finite number, not {shorten(value)}")
    return float(value)


def parse_cell(value: object) -> object:
    """A cell of a CSV or TSV file as a number, a truth value or a list where it is one, else as it is.

    A comma in a number is a decimal comma, as spreadsheets write where the semicolon separates cells, unless it may
    separate thousands.
    """
    if not isinstance(value, str):
        return value
    if (truth := _TRUTH_VALUES.get(value.strip().lower())) is not None:
        return truth
    if _DECIMAL_COMMA.fullmatch(value.strip()) and not _THOUSANDS.fullmatch(value.strip()):
        return float(value.replace(",", "."))
    try:
        return json.loads(value) if value.lstrip().startswith("[") else float(value)
    except (ValueError, RecursionError):
        return value


def positive_marks(value: object, name: str, count: int) -> list[bool]:
    """A list of 1 (positive) or 0 (negative) for each of `count` documents."""
    marks = one_per_text(value, name, "the documents", count, number)
    for i, mark in enumerate(marks, 1):
        if mark not in (0, 1):
            raise BadRow(f"element {i} of {name} must be 1 for a positive or 0 for a negative, not {mark:g}")
    return [mark == 1 for mark in marks]


def class_label(value: object, name: str) -> int:
    """The number of a class."""
    if isinstance(value, str):
        raise BadRow(
            f"{name} must be the number of the row's class, not {describe_value(value)}: number the classes from 0"
        )
    label = number(value, name)
    if not label.is_integer() or abs(label) >= 2**53:
        raise BadRow(f"{name} must be the number of the row's class, a whole number, not {describe_value(value)}")
    return int(label)


def vectors(value: object, name: str, num_texts: int) -> list[Sequence[float]]:
    """One vector for all texts, or a list of one vector for each of `num_texts` texts."""
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        return [_vector(value, name)]
    if len(value) != num_texts:
        raise BadRow(
            f"{name} has {format_count(len(value), 'vector')} and the row has {format_count(num_texts, 'text')}: "
            "give one for each, or one list of numbers for all"
        )
    return [_vector(element, f"element {i} of {name}") for i, element in enumerate(value, 1)]


def _vector(value: object, name: str) -> Sequence[float]:
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else describe_value(value)
        raise BadRow(f"{name} must be a vector, a list of numbers, not {shown}")
    if not set(map(type, value)) <= {int, float}:  # one test for all elements, since vectors are long
        raise BadRow(f"{name} must be a vector, a list of numbers, not {describe_value(value)}")
    try:
        vector = array("f", value)
    except OverflowError:
        vector = array("f", [float("inf")])
    if not np.isfinite(np.frombuffer(vector, dtype=np.float32)).all():
        raise BadRow(f"{name} holds a number that is not finite")
    return vector


def scores(value: object, name: str, num_positives: int, num_negatives: int, num_columns: int) -> list[float]:
    """The score of every document of a row, positives first, in the formats of sentence-transformers.

    `value` is the score of a pair; the margin of the positive over the negative of a triplet; a list with the score of
    each document; or a list with a margin for each negative. Margins give only differences of scores, so the positive
    gets 0. `num_columns` counts text columns with the query's: a triplet that lacks its negative is not a pair.
    """
    num_documents = num_positives + num_negatives
    documents = f"{format_count(num_positives, 'positive')} and {format_count(num_negatives, 'negative')}"
    if isinstance(value, list):
        numbers = [number(element, f"element {i} of {name}") for i, element in enumerate(value, 1)]
        if len(numbers) == num_documents:
            return numbers
        if numbers and num_positives == 1 and len(numbers) == num_negatives:
            return _scores_of_margins(numbers)
        raise BadRow(
            f"{name} has {format_count(len(numbers), 'number')} and the row has {documents}: "
            "give the score of each, or its margin over each negative where there is one positive"
        )
    score = number(value, name)
    if num_columns == 2 and num_documents == 1:
        return [score]
    if num_columns == 3 and (num_positives, num_negatives) == (1, 1):
        return _scores_of_margins([score])
    raise BadRow(
        f"{name} is one number, the score of one pair or the margin of one positive over one negative, "
        f"and the row has {documents}: give a list"
    )


def _scores_of_margins(margins: list[float]) -> list[float]:
    return [0.0, *(0.0 - margin for margin in margins)]
