"""Standard input, output and error of a command: text cannot control the terminal, and no write fails."""

import errno
import io
import os
import re
import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO, cast

from embedtrain.utils.formatting import printable

# The terminal or the reader of a pipe is gone: nobody misses the output. Any other error loses output that is wanted.
_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET)
# What progress bars of libraries write in calls of their own: to the start of the line, lines up, delete the line.
_CURSOR = re.compile(r"(?:\r|\n|\x1b\[Am?|\x1b\[2?K)+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PACKAGE = __name__.partition(".")[0]
_DESCRIPTORS = 3  # of standard input, output and error


@dataclass(slots=True)
class _Target:
    """The wrapped stream, until a write fails, and the error that lost output."""

    stream: TextIO | None
    error: OSError | None = None


class SafeStream(io.TextIOBase):
    """Forwards text, and drops it once it cannot be written (closed pipe, closed terminal, full disk).

    Output that nobody can read must not stop training. Control characters become visible: names and texts of files
    would otherwise move the cursor, change the title or hide a part of the line. A `styled` stream forwards them; it
    is for rich, whose texts are `printable` before they get their style. Colours of libraries are dropped.
    """

    def __init__(self, stream: TextIO | None, *, styled: bool = False) -> None:
        self._target = stream._target if isinstance(stream, SafeStream) else _Target(stream)
        self._styled = styled

    @property
    def error(self) -> OSError | None:
        """Why output is lost that somebody wanted; None if there is none, or if its reader has gone."""
        return self._target.error

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the wrapped stream."""
        return getattr(self._target.stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        r"""Write `text`; characters that the encoding lacks are written as `\u4e2d`."""
        visible = text if self._styled else self._visible(text)
        try:
            if self._target.stream is not None:
                self._target.stream.write(visible.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except (OSError, ValueError) as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flush the wrapped stream."""
        try:
            if self._target.stream is not None:
                self._target.stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def isatty(self) -> bool:
        """Whether the wrapped stream is a terminal."""
        try:
            return self._target.stream is not None and self._target.stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """The file descriptor of the wrapped stream; OSError if there is none."""
        if self._target.stream is None:
            raise OSError("there is no stream")
        return self._target.stream.fileno()

    def __getattr__(self, name: str) -> Any:
        """`buffer`, `name` and others of the wrapped stream, which libraries read."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._target.stream, name)

    def _visible(self, text: str) -> str:
        if _CURSOR.fullmatch(text) and self.isatty():
            return text
        begin = "\r" * text.startswith("\r")  # of the line of a progress bar
        return begin + printable(_COLOUR.sub("", text[len(begin) :]), lines=True)  # libraries colour their messages

    def _drop(self, error: OSError | ValueError) -> None:
        self._target.stream = None
        if isinstance(error, OSError) and error.errno not in _GONE:
            self._target.error = error


class NoOutput(io.TextIOBase):
    """Standard output of a call with `quiet=True`: drops what is printed. Warnings go to Python's `warnings`."""

    def write(self, text: str) -> int:
        """Drop `text`."""
        return len(text)


def warn_caller(text: str) -> None:
    """A UserWarning at the line of the program that has called this package."""
    frame: FrameType | None = sys._getframe(1)
    caller = frame
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
            caller = frame.f_back or frame
        frame = frame.f_back
    assert caller is not None
    warnings.warn_explicit(text, UserWarning, caller.f_code.co_filename, caller.f_lineno)


def protect_standard_streams() -> None:
    """Make writes to standard output and error safe, and open those of the three descriptors that are closed.

    A closed descriptor would become that of the next file that is opened: of a checkpoint, into which a library would
    print. Invalid bytes of standard input become U+FFFD.
    """
    for descriptor in range(_DESCRIPTORS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - stays open
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    sys.stdout = cast(TextIO, SafeStream(sys.stdout))
    sys.stderr = cast(TextIO, SafeStream(sys.stderr))
