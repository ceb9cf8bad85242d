"""A standard output that cannot fail: what nobody can read any more must not stop a training."""

import io
from typing import TextIO


class UnbreakableStream(io.TextIOBase):
    """Passes text on; once the other end is gone (closed pipe, closed terminal, full disk) it swallows it."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream behind."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write `text`; characters that the encoding lacks become `?`."""
        if self._stream is not None:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def isatty(self) -> bool:
        """Whether a terminal is behind it."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """The stream's file descriptor.

        Raises:
            OSError: there is none.
        """
        if self._stream is None:
            raise OSError("there is no stream")
        return self._stream.fileno()
