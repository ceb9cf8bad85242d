"""Single values of a row, checked: texts, scores, ids, classes, vectors. What is wrong with one is a BadRow."""

import json
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from embedtrain.data.sources.problems import BadRow, counted, shorten, told
from embedtrain.data.types import Texts

T = TypeVar("T")

LARGEST_NUMBER = float(np.finfo(np.float32).max)  # scores and vectors are kept in float32


def checked(
    query: str,
    positives: Sequence[str],
    negatives: Sequence[str],
    *,
    scores: Sequence[float] = (),
    positive_ids: Sequence[str] = (),
    negative_ids: Sequence[str] = (),
    label: int | None = None,
    vectors: Sequence[Sequence[float]] = (),
    instruction: str | None = None,
    document_instruction: str | None = None,
    most_negatives: int | None = None,
) -> Texts:
    """A row whose negatives are distinct and no positives; with a negative goes what lies beside it.

    Args:
        query: the query.
        positives: the positives.
        negatives: the hard negatives as the row has them.
        scores: one for each positive, then one for each negative; or none.
        positive_ids: one for each positive, or none.
        negative_ids: one for each negative, or none.
        label: the row's class.
        vectors: one for all texts, or one for each: query, positives, negatives; or none.
        instruction: the query's own; "" for none at all, None where the row says nothing.
        document_instruction: the documents' own, likewise.
        most_negatives: how many may be used at a time.
    """
    first_places: dict[str, int] = {}
    for place, text_ in enumerate(negatives):
        if text_ not in positives:
            first_places.setdefault(text_, place)

    def kept(values: Sequence[T]) -> tuple[T, ...]:
        return tuple(values[place] for place in first_places.values()) if values else ()

    count = len(positives)
    return Texts(
        query,
        tuple(positives),
        tuple(first_places),
        len(negatives) - len(first_places),
        positive_scores=tuple(scores[:count]),
        negative_scores=kept(scores[count:]),
        positive_ids=tuple(positive_ids),
        negative_ids=kept(negative_ids),
        label=label,
        vectors=(*vectors[: 1 + count], *kept(vectors[1 + count :])),
        instruction=instruction,
        document_instruction=document_instruction,
        most_negatives=most_negatives,
    )


def texts(value: object, what: str) -> list[str]:
    """A text, or a list of texts."""
    return text_list(value, what) if isinstance(value, list) else [text(value, what)]


def text_list(value: object, what: str) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list):
        hint = ": put it in brackets" if isinstance(value, str) else ""
        raise BadRow(f"{what} must be a list of texts, not {told(value)}{hint}")
    return [text(element, f"element {i} of {what}") for i, element in enumerate(value, 1)]


def text(value: object, what: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str):
        raise BadRow(f"{what} must be a text, not {told(value)}")
    if not value.strip():
        raise BadRow(f"{what} is an empty text")
    return _encodable(value, what)


def _encodable(value: str, what: str) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            around = value[max(0, error.start - 10) : error.start + 10]
            raise BadRow(f"{what} holds half a character (a lone surrogate): {shorten(around)}") from None
    return value


def titled(title: object, value: object, what: str) -> str:
    """A document's text with its title before it, as Tevatron and BEIR join them; it may be empty."""
    parts = []
    for part, name in ((title, '"title"'), (value, what)):
        if part is not None and not isinstance(part, str):
            raise BadRow(f"{name} must be a text, not {told(part)}")
        parts.append(_encodable(part or "", name))
    return " ".join(parts).strip()


def instructed(value: object, what: str) -> tuple[str | None, str]:
    """A text that may have its own instruction: the text alone, or [instruction, text]; "" is no instruction."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(element, str) for element in value):
        return _encodable(value[0], what), text(value[1], what)
    return None, text(value, what)


def instruction(value: object, what: str) -> str | None:
    """An instruction: a text, "" for none at all; None for null."""
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{what} must be a text, not {told(value)}")
    return None if value is None else _encodable(value, what)


def one_each(value: object, what: str, texts_name: str, count: int, read: Callable[[object, str], T]) -> list[T]:
    """A list with one element for each of `count` texts, each read with `read`."""
    if not isinstance(value, list):
        raise BadRow(f"{what} must be a list, one element for each text of {texts_name}, not {told(value)}")
    if len(value) != count:
        elements, wanted = counted(len(value), "element"), counted(count, "text")
        raise BadRow(f"{what} has {elements} and {texts_name} has {wanted}: give one for each")
    return [read(element, f"element {i} of {what}") for i, element in enumerate(value, 1)]


def identifier(value: object, what: str) -> str:
    """A document's id, a text or a whole number; "" for null."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _encodable(value, what)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadRow(f"{what} must be an id, a text or a whole number, not {told(value)}")


def number(value: object, what: str) -> float:
    """A finite number; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"{what} must be a number, not {told(value)}")
    if not abs(value) <= LARGEST_NUMBER:
        raise BadRow(f"{what} must be a finite number, not {shorten(value)}")
    return float(value)


def marks(value: object, what: str, count: int) -> list[bool]:
    """A list of 1 or 0 for each of `count` documents."""
    given = one_each(value, what, "the documents", count, number)
    for i, element in enumerate(given, 1):
        if element not in (0, 1):
            raise BadRow(f"element {i} of {what} must be 1 for a positive or 0 for a negative, not {element:g}")
    return [element == 1 for element in given]


def class_number(value: object, what: str) -> int:
    """The number of a class."""
    if isinstance(value, str):
        raise BadRow(f"{what} must be the number of the row's class, not {told(value)}: number the classes from 0")
    whole = number(value, what)
    if not whole.is_integer() or abs(whole) >= 2**53:
        raise BadRow(f"{what} must be the number of the row's class, a whole number, not {told(value)}")
    return int(whole)


def vectors(value: object, what: str, num_texts: int) -> list[Sequence[float]]:
    """A list of numbers, the vector of all texts; or a list of such lists, one for each of `num_texts` texts."""
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        return [_vector(value, what)]
    if len(value) != num_texts:
        raise BadRow(
            f"{what} has {counted(len(value), 'vector')} and the row has {counted(num_texts, 'text')}: "
            "give one for each, or one list of numbers for all"
        )
    return [_vector(element, f"element {i} of {what}") for i, element in enumerate(value, 1)]


def _vector(value: object, what: str) -> Sequence[float]:
    if not isinstance(value, list) or not value:
        raise BadRow(
            f"{what} must be a vector, a list of numbers, not {told(value) if value != [] else 'an empty list'}"
        )
    if not set(map(type, value)) <= {int, float}:  # one look at all, since vectors are long
        raise BadRow(f"{what} must be a vector, a list of numbers, not {told(value)}")
    try:
        vector = array("f", value)
    except OverflowError:
        vector = array("f", [float("inf")])
    if not np.isfinite(np.frombuffer(vector, dtype=np.float32)).all():
        raise BadRow(f"{what} holds a number that is not finite")
    return vector


def scores(value: object, what: str, positives: int, negatives: int, num_columns: int) -> list[float]:
    """The score of every document of a row, positives first, as sentence-transformers' columns give it.

    Args:
        value: the score of a pair; the margin of the positive over the negative of a triplet; a list of a
            score for each document; or a list of a margin for each negative. Of margins only differences of
            scores are known, so the positive counts 0.
        what: the value's name for messages.
        positives: how many the row has.
        negatives: how many the row has.
        num_columns: text columns, the query's included: a triplet that lacks its negative is no pair.
    """
    count, documents = positives + negatives, f"{counted(positives, 'positive')} and {counted(negatives, 'negative')}"
    if isinstance(value, list):
        given = [number(element, f"element {i} of {what}") for i, element in enumerate(value, 1)]
        if len(given) == count:
            return given
        if given and positives == 1 and len(given) == negatives:
            return _below_zero(given)
        raise BadRow(
            f"{what} has {counted(len(given), 'number')} and the row has {documents}: "
            "give the score of each, or its margin over each negative where there is one positive"
        )
    one = number(value, what)
    if num_columns == 2 and count == 1:
        return [one]
    if num_columns == 3 and (positives, negatives) == (1, 1):
        return _below_zero([one])
    raise BadRow(
        f"{what} is one number, the score of one pair or the margin of one positive over one negative, "
        f"and the row has {documents}: give a list"
    )


def _below_zero(margins: list[float]) -> list[float]:
    return [0.0, *(0.0 - margin for margin in margins)]


def cell(value: object) -> object:
    """What a cell of a CSV or TSV file means where no text is wanted: a number, a list, else the text itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.lstrip().startswith("[") else float(value)
    except (ValueError, RecursionError):
        return value
