"""Detect changes of a source's files after its cache key was computed: a key never holds rows of other files."""

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
    """The content of a source's files, from which its key is computed, and their versions at that time.

    Raises:
        DataError: a file of the source is missing or cannot be read.
    """

    def __init__(self, reading: SourceReader | DocumentReader, content: Mapping[str, Any] | None = None) -> None:
        self._reading = reading
        self._versions = self._all_versions()  # before the content, so that a change in between is detected
        self.content = reading.content() if content is None else content

    @contextmanager
    def during(self, parts: Sequence[Part]) -> Iterator[None]:
        """Raise a DataError if one of the parts, read in the block, has changed since the key, or changes meanwhile.

        Only local files are checked, by size and time: cheap, and detects nearly every change.
        """
        before = [self._version(part) for part in parts]
        try:
            yield
        except EmbedtrainError as error:  # the cause may be a file that is being written
            _require_equal(parts, before, error)
            raise
        _require_equal(parts, before)

    def require(self, directory: Path, names: Sequence[str]) -> None:
        """Compare the content of all files; if it differs, remove the results `names` in `directory`.

        Raises:
            DataError: a file was changed, or is missing.
        """
        try:
            self._require_content()
        except EmbedtrainError:
            for name in names:
                shutil.rmtree(directory / name, ignore_errors=True)
            raise

    def _version(self, part: Part) -> object:
        """The current version of a part, which has the same content as when the key was computed."""
        version = _version_of(part)
        if version != self._versions[part]:
            versions = self._all_versions()
            self._require_content()
            self._versions = versions  # the bytes are the same
            version = versions[part]
        return version

    def _all_versions(self) -> dict[Part, object]:
        return {part: _version_of(part) for part in (*self._reading.parts, *self._reading.document_parts)}

    def _require_content(self) -> None:
        now = self._reading.content()
        for key, parts in (("parts", self._reading.parts), ("documents", self._reading.document_parts)):
            for part, old, new in zip(parts, self.content[key], now[key], strict=True):
                if new != old:
                    raise file_changed_error(part.name)


def _require_equal(parts: Sequence[Part], versions: Sequence[object], error: Exception | None = None) -> None:
    for part, version in zip(parts, versions, strict=True):
        if _version_of(part) != version:
            raise file_changed_error(part.name) from error


def _version_of(part: Part) -> object:
    """A value that changes when a local file of the part is written."""
    # The time of a folder changes with any file in it, such as a lock.
    return None if part.kind is PartKind.hub else [file_version(file.name) for file in part.tables or (part,)]
