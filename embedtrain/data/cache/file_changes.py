"""Whether the files of a source are still what its key was made of: rows of others must never lie under it."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedtrain.data.sources.documents import DocumentReader
from embedtrain.data.sources.files import file_changed_error, file_version
from embedtrain.data.sources.parts import Part, PartKind
from embedtrain.data.sources.reader import SourceReader
from embedtrain.errors import EmbedtrainError


class SourceVersion:
    """What the files of a source were when its key was made.

    Args:
        reading: the source.
        content: what `reading.content` said a moment ago; None: it is asked now.

    Attributes:
        content: what the key is made of.

    Raises:
        DataError: a file of the source is gone or cannot be read.
    """

    def __init__(self, reading: SourceReader | DocumentReader, content: Mapping[str, Any] | None = None) -> None:
        self._reading = reading
        self._versions = self._all_versions()  # before their content is asked for: a change in between must show
        self.content = reading.content() if content is None else content

    @contextmanager
    def during(self, parts: Sequence[Part]) -> Iterator[None]:
        """Guard a block that reads parts of the source: what it read is what the key was made of, or it fails.

        Files here alone are looked at, by size and time: that costs nothing, and tells of nearly every change.

        Raises:
            DataError: a part was changed since the key was made, or by the end of the block.
        """
        before = [self._version(part) for part in parts]
        try:
            yield
        except EmbedtrainError as error:  # half a row of a file that is being written is not what is wrong
            _require_equal(parts, before, error)
            raise
        _require_equal(parts, before)

    def require(self, directory: Path, names: Sequence[str]) -> None:
        """Compare the content of all files with what it was; on a difference remove what was made of them.

        Args:
            directory: the folder that is named after the key.
            names: of what was built in it, which nobody else builds or joins meanwhile.

        Raises:
            DataError: a file was changed, or is gone.
        """
        try:
            self._require_content()
        except EmbedtrainError:
            for name in names:
                shutil.rmtree(directory / name, ignore_errors=True)
            raise

    def _version(self, part: Part) -> object:
        """The version of a part now, that is still of the content that the key was made of."""
        version = _version_of(part)
        if version != self._versions[part]:
            versions = self._all_versions()
            self._require_content()
            self._versions = versions  # not one byte is another
            version = versions[part]
        return version

    def _all_versions(self) -> dict[Part, object]:
        return {part: _version_of(part) for part in (*self._reading.parts, *self._reading.document_parts)}

    def _require_content(self) -> None:
        now = self._reading.content()
        for key, parts in (("parts", self._reading.parts), ("documents", self._reading.document_parts)):
            for part, first, found in zip(parts, self.content[key], now[key], strict=True):
                if found != first:
                    raise file_changed_error(part.name)


def _require_equal(parts: Sequence[Part], versions: Sequence[object], error: Exception | None = None) -> None:
    for part, version in zip(parts, versions, strict=True):
        if _version_of(part) != version:
            raise file_changed_error(part.name) from error


def _version_of(part: Part) -> object:
    """What changes when a file of the part is written again; nothing does of data sets and what lies elsewhere."""
    # The time of a folder changes with any file in it, such as a lock.
    return None if part.kind is PartKind.hub else [file_version(file.name) for file in part.tables or (part,)]
