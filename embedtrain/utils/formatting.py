"""Counts, bytes, durations and texts of files as messages show them, and URLs without passwords."""

import re
import textwrap
from pathlib import Path

# `user:password@` of a URL. A password may hold any character; digits before a slash are a port.
_USER_AND_PASSWORD = re.compile(r"(://[^/\s:@'\"]*:)(?!\d+(?:[/\s]|$))[^\s'\"]*@")
_TOKEN_AS_USER = re.compile(r"(https?://)[^/\s:@'\"]+@", re.IGNORECASE)

_LONG_WORD = re.compile(r"\S{1001,}")  # paths are shorter
_MAX_MESSAGE = 6000  # characters; messages that list nodes, columns or keys are shorter

# Characters that a terminal obeys instead of showing them: C0 and C1 control characters, among them those that begin
# escape sequences, marks that change the direction of the line, and Unicode's line separators.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *_DIRECTIONS)}
_ESCAPES |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
_ESCAPES_OF_LINES = {code: escape for code, escape in _ESCAPES.items() if code not in (ord("\n"), ord("\t"))}


def decode_argument(text: str) -> str:
    """An argument of the command line as UTF-8: in an ASCII locale Python keeps its bytes as lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text on one line, with escapes such as `\x1b` for control characters; `lines` keeps line breaks and tabs."""
    return text.translate(_ESCAPES_OF_LINES if lines else _ESCAPES)


def shorten_message(text: str) -> str:
    """A message without the middle of long words, such as values of options, and of what is still long then."""
    text = _LONG_WORD.sub(lambda match: f"{match[0][:200]}...{match[0][-100:]}", text)
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"


def mask_passwords(text: str) -> str:
    """The text with `***` in place of passwords in URLs: `ftp://user:***@host`, `https://***@host`."""
    return _TOKEN_AS_USER.sub(r"\1***@", _USER_AND_PASSWORD.sub(r"\1***@", text))


def install_command(extra: str) -> str:
    """The command that installs an optional dependency; in a checkout it installs the checkout, from its folder."""
    is_checkout = (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()
    return f"pip install '{'.' if is_checkout else 'embedtrain'}[{extra}]'"


def format_count(count: int, singular: str, plural: str | None = None) -> str:
    """`1 rank`, `2 ranks`, `1,234 rows`."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def format_bytes(num_bytes: float, *, binary: bool = False) -> str:
    """`812 bytes`, `1.5 GB`; with `binary`, for memory, units of 1024 bytes: `1.4 GiB`."""
    base, infix = (1024, "i") if binary else (1000, "")
    for unit in ("bytes", f"K{infix}B", f"M{infix}B", f"G{infix}B"):
        if abs(num_bytes) < base:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= base
    return f"{num_bytes:,.1f} T{infix}B"


def format_duration(seconds: float) -> str:
    """`0.8 s`, `42 s`, `4 min 10 s`, `3 h 12 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if minutes == 0:
        return f"{second} s"
    if hours == 0:
        return f"{minute} min {second} s"
    return f"{hours} h {minute} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
