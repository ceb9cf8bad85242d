"""What is wrong with a row, and values as sentences to the user show them."""

import json


class BadRow(Exception):
    """One row that cannot be used; the text says why, without saying where."""


def not_utf8(data: bytes, position: int) -> str:
    """The sentence about bytes that are no UTF-8, with some text around them."""
    around = data[max(0, position - 20) : position + 20].decode("utf-8", "surrogateescape").strip()
    shown = shorten(around).replace("\\udc", "\\x")  # how Python writes a byte that is no character
    return f"not UTF-8 (byte 0x{data[position]:02x} in {shown}): save the file as UTF-8"


def json_problem(error: json.JSONDecodeError) -> str:
    """What JSON's reader says is wrong, to be followed by where."""
    return error.msg.removesuffix(" at").removesuffix(" starting")


def counted(number: int, what: str) -> str:
    """A number of things: `1 cell`, `2 cells`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def shorten(value: object, length: int = 60) -> str:
    """A value as messages show it: on one line, not longer than `length` and three dots."""
    text = repr(value if not isinstance(value, str) else value[: length + 1])
    return text if len(text) <= length + 2 else text[:length] + "..."


def told(value: object) -> str:
    """What a value is, in a user's words, and the value itself, shortened."""
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
        case _:
            return f"{type(value).__name__} ({shorten(value)})"


def describe_error(error: BaseException, length: int = 300) -> str:
    """What another library raised, in one line: its type and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:length]}" if text else type(error).__name__
