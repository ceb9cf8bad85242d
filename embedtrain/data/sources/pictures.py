"""Values of rows that are pictures: where they stand in a row, what is read of them, and how items are written.

A string is a picture only in a column of pictures, by its name or by the schema of its file: a text that happens to be
the name of a file stays a text. The pictures of a row are read when its layout uses them, see `PictureValue`.
"""

import base64
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from embedtrain.data.images.item import MARK, Picture, chunks_of, described, has_chunks, has_pictures, item_parts, plain
from embedtrain.data.sources.files import is_url, local_path
from embedtrain.data.sources.parts import PartKind, SourcePart
from embedtrain.data.sources.values import (
    MAX_DEPTH,
    BadRow,
    PictureValue,
    TarMember,
    picture_values,
    shorten,
    with_pictures,
)
from embedtrain.errors import DataError
from embedtrain.utils.formatting import printable

if TYPE_CHECKING:
    from embedtrain.data.images.files import Header, Place

# Endings of names of pictures, which tell that a column such as `filepath` has pictures.
SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2"),
    *(".avif", ".heic", ".svg"),  # which are refused by name, and are no texts
}
# Columns of pictures by their names: image, images, query_image, image_path, page-image, jpg, ...
_NAME = re.compile(
    r"(?:.*[_\-\s.])?(?:images?|imgs?|pictures?|photos?|screenshots?)(?:[_\-\s]?(?:path|file|url|uri)s?)?[_\-\s]?\d*"
    r"|jpe?g|png|webp",
    re.IGNORECASE,
)
# Columns that may name any files: pictures where the first rows say so.
_FILE_NAME = re.compile(
    r"(?:.*[_\-\s.])?(?:file[_\-\s]?(?:path|name)?|image[_\-\s]?(?:file)?name|path)s?", re.IGNORECASE
)
# The picture of a query, positive or negative whose text is another column, as in MMEB and Tevatron.
_OF_TEXT = re.compile(
    r"(query|qry|question|anchor|positive|pos|negative|neg)_(?:images?|img)(?:_paths?)?", re.IGNORECASE
)
# The file of a PNG, JPEG, WebP, GIF or TIFF in Base64, which is no name: it has no dot.
_BASE64 = re.compile(r"(?:iVBORw0KGg|/9j/|UklGR|R0lGOD|SUkqA|TU0AK)[A-Za-z0-9+/\s]{50,}={0,2}\s*")
_SLOT = re.compile(r"<\|image_\d+\|>")
_ENCODED = {"bytes", "path"}  # the fields of an Image of `datasets` in Parquet and Arrow
_NUM_KNOWN = 4096  # names of files whose pictures were read last
LINKED_FOLDER = "images"  # beside rows that are written


class PictureSink(Protocol):
    """What remembers the places of pictures that are read."""

    def add_file(self, header: "Header", place: "Place") -> None:
        """A picture in a file of the user."""
        ...

    def add_bytes(self, header: "Header", data: bytes) -> None:
        """A picture among the values of a row, whose bytes are kept."""
        ...


def picture_folder(part: SourcePart) -> str | None:
    """The folder that names of pictures in a part are relative to; None where there is none on this machine."""
    if part.image_dir is not None and part.kind is not PartKind.tar:
        return os.path.abspath(local_path(part.image_dir))
    name = local_path(part.tables[1].name if part.tables else part.name)  # of a BEIR folder, that of its queries
    if is_url(name):
        return None
    if part.kind is PartKind.hub:
        return os.path.abspath(name) if os.path.isdir(name) else None
    return os.path.dirname(os.path.abspath(name))


class RowPictures:
    """Finds the pictures in the rows of one part.

    Args:
        part: the file that the rows are from.
        sink: remembers pictures that are read; default: this process does, as long as it runs.
        columns: the columns that are used; None: any.
        first_rows: gives the first rows of the part, which decide about columns of names of files.
    """

    def __init__(
        self,
        part: SourcePart,
        sink: PictureSink | None = None,
        columns: Sequence[str] | None = None,
        first_rows: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
    ) -> None:
        self.folder = picture_folder(part)
        self._in_folder = "" if part.image_dir is None else f" in image_dir={printable(part.image_dir)}"
        self._max_pixels = part.max_image_pixels
        self._declared = frozenset(part.image_columns)
        self._sink, self._columns, self._first_rows = sink, columns, first_rows
        self._file_columns: dict[str, bool] = {}
        self._known: dict[str, str] = {}

    def row(self, row: dict[str, Any], *, is_flat: bool = False) -> dict[str, Any]:
        """The row with its pictures as PictureValue; texts lose the character that marks references of pictures.

        `is_flat`, where it is known, saves a look at each value.
        """
        if (
            _are_texts(tuple(row)) and self._declared.isdisjoint(row) and (is_flat or all(map(_is_plain, row.values())))
        ):  # most rows
            return row
        found = {key: self._value(value, self._is_picture(key, row)) for key, value in row.items()}
        for key in row:
            if (role := _role_of(key)) and self._is_used(key):
                self._join(found, key, role)
        return found

    def read_file(self, value: str, name: str) -> str:
        """The reference of the picture in a file, by its name in a row. Raises BadRow if it cannot be used."""
        if (known := self._known.get(value)) is not None:
            return known
        from embedtrain.data.images.files import Place  # torch is imported with it

        place = Place(self.path_of(value, name))
        item = self.read_place(place, f"{name} names {shorten(value, 200)}{self._in_folder}, and ")
        if len(self._known) >= _NUM_KNOWN:
            self._known.clear()
        self._known[value] = item
        return item

    def path_of(self, value: str, name: str) -> str:
        """The path of a file that a row names, which is in the folder of its part. Raises BadRow."""
        shown = shorten(value, 200)
        if is_url(value):
            raise BadRow(
                f"{name} names {shown}, and pictures are not downloaded: fetch them before, as img2dataset does"
            )
        if self.folder is None:
            raise BadRow(
                f"{name} names {shown}, and this data is in no local folder: download it, or write image_dir, a folder "
                "with the pictures, beside its path"
            )
        path = os.path.normpath(os.path.join(self.folder, value))
        if not path.startswith(self.folder.rstrip(os.sep) + os.sep):
            raise BadRow(
                f"{name} names {shown}, which is outside of {printable(self.folder)}: move the pictures into it, or "
                "write image_dir, a folder that holds all of them, beside the path of this data"
            )
        return path

    def read_place(self, place: "Place", what: str) -> str:
        """The reference of the picture at a place; `what` begins the message of BadRow."""
        from embedtrain.data.images.files import read_header

        return self._read(lambda: read_header(place, max_pixels=self._max_pixels), what, place)

    def read_bytes(self, data: bytes, name: str) -> str:
        """The reference of the picture of a file with these bytes. Raises BadRow if it cannot be used."""
        from embedtrain.data.images.files import header_of

        what = f"{name} holds a file of {len(data):,} bytes, and "
        return self._read(lambda: header_of(data, max_pixels=self._max_pixels), what, data)

    def _read(self, read_header: Callable[[], "Header"], what: str, found: "Place | bytes") -> str:
        from embedtrain.data.images.files import PICTURES, BadPicture

        try:
            header = read_header()
        except BadPicture as bad:
            raise BadRow(f"{what}{bad}") from None
        sink = PICTURES if self._sink is None else self._sink
        if isinstance(found, bytes):
            sink.add_bytes(header, found)
        else:
            sink.add_file(header, found)
        return str(header.picture)

    def _value(self, value: Any, is_picture: bool, depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._of_text(value) if is_picture else plain(value)
        if depth == MAX_DEPTH:
            return value
        if isinstance(value, list):
            # Vectors and scores are long.
            if not value or isinstance(value[0], bool | int | float):
                return value
            if not is_picture and _are_plain(value):  # most lists
                return value
            return [self._value(element, is_picture, depth + 1) for element in value]
        if isinstance(value, dict):
            if value.keys() == _ENCODED and isinstance(value["bytes"], bytes | None):
                return self._encoded(value)
            return {
                key: self._value(element, self._is_name(key) or (is_picture and key in ("url", "path")), depth + 1)
                for key, element in value.items()
            }
        if isinstance(value, TarMember):
            return _Member(self, value)
        return _Bytes(self, value) if is_picture and isinstance(value, bytes) else value

    def _of_text(self, value: str) -> PictureValue | None:
        if value[:5].lower() == "data:" or _BASE64.fullmatch(value):
            return _Base64(self, value)
        return _File(self, value) if value.strip() else None

    def _encoded(self, value: dict[str, Any]) -> Any:
        if value["bytes"] is not None:
            return _Bytes(self, value["bytes"])
        return _File(self, value["path"]) if value["path"] else None

    def _is_name(self, key: str) -> bool:
        return is_picture_name(key) or key in self._declared

    def _is_used(self, key: str) -> bool:
        return self._columns is None or key in self._columns

    def _is_picture(self, key: str, row: Mapping[str, Any]) -> bool:
        if not self._is_used(key):
            return False
        if self._is_name(key):
            return True
        if not _is_file_name(key) or any(map(is_picture_name, row)):
            return False
        if key not in self._file_columns:
            names = [first.get(key) for first in self._first_rows()] or [row[key]]
            self._file_columns[key] = any(
                isinstance(name, str) and os.path.splitext(name)[1].lower() in SUFFIXES for name in names
            )
        return self._file_columns[key]

    def _join(self, row: dict[str, Any], key: str, role: str) -> None:
        """Join the picture of a query, positive or negative with its text, if that is another column."""
        partner = next((name for name in (f"{role}_text", role) if name in row and self._is_used(name)), None)
        if partner is None:
            return
        text, pictures = row[partner], row.pop(key)
        if isinstance(text, list) and isinstance(pictures, list) and len(text) == len(pictures):
            row[partner] = [
                _joined(each, list(picture_values(found))) for each, found in zip(text, pictures, strict=True)
            ]
        elif isinstance(text, str | None):
            row[partner] = _joined(text, list(picture_values(pictures)))


def is_flat(line: bytes) -> bool:
    """Whether a row of JSON surely has no object in it and no mark, by single bytes, which are found ten times faster.

    The mark begins with 0xef in UTF-8, and with a backslash where it is escaped.
    """
    return (line.isascii() or b"\xef" not in line) and line.find(b"{", 1) < 0 and line.find(b"\\") < 0


@lru_cache(1000)
def _are_texts(names: tuple[str, ...]) -> bool:
    """Whether no column of these names has pictures."""
    return not any(is_picture_name(name) or _is_file_name(name) or _role_of(name) for name in names)


def _is_plain(value: Any) -> bool:
    """Whether a value has neither pictures nor the mark; False where only a closer look tells."""
    if isinstance(value, str):
        return MARK not in value
    if isinstance(value, list):
        return not value or isinstance(value[0], int | float) or _are_plain(value)
    return value is None or isinstance(value, int | float)


@cache
def is_picture_name(name: str) -> bool:
    """Whether a column of this name has pictures: image, query_image, image_path, jpg, ..."""
    return _NAME.fullmatch(name) is not None


def _are_plain(value: list[Any]) -> bool:
    """Whether all elements are texts without the mark."""
    try:
        return MARK not in "".join(value)
    except TypeError:
        return False


@cache
def _role_of(name: str) -> str | None:
    match = _OF_TEXT.fullmatch(name)
    return match and match[1]


@cache
def _is_file_name(name: str) -> bool:
    return _FILE_NAME.fullmatch(name) is not None


def _joined(text: str | None, pictures: list[PictureValue]) -> Any:
    return _Mixed(text or "", pictures) if pictures else text or None


class _File(PictureValue):
    """A picture by the name of its file."""

    def __init__(self, reader: RowPictures, name: str) -> None:
        self._reader, self._name = reader, name
        self.is_url = is_url(name)

    def read(self, name: str) -> str:
        return self._reader.read_file(self._name, name)

    @property
    def version(self) -> object:
        try:
            status = os.stat(self._reader.path_of(self._name, ""))
        except (BadRow, OSError, ValueError):
            return self._name
        return [self._name, status.st_size, status.st_mtime_ns]

    def __repr__(self) -> str:
        return shorten(self._name)


class _Bytes(PictureValue):
    """A picture by the bytes of its file, which the row's file has, and so its digest."""

    version = None

    def __init__(self, reader: RowPictures, data: bytes) -> None:
        self._reader, self._data = reader, data

    def read(self, name: str) -> str:
        return self._reader.read_bytes(self._data, name)

    def __repr__(self) -> str:
        return f"{len(self._data):,} bytes"


class _Base64(_Bytes):
    """A picture by the bytes of its file in Base64, alone or as a data URI; decoded where it is used."""

    def __init__(self, reader: RowPictures, text: str) -> None:
        super().__init__(reader, b"")
        self._text = text

    def read(self, name: str) -> str:
        head, _, text = self._text.rpartition(",")  # no sign of Base64
        if self._text[:5].lower() == "data:" and not head.lower().endswith(";base64"):
            raise BadRow(
                f"{name} is a data URI that is not in Base64 ({shorten(self._text)}): write the name of a file"
            )
        try:
            self._data = base64.b64decode("".join(text.split()), validate=True)
        except ValueError as error:
            raise BadRow(f"{name} is damaged Base64 ({error}): {shorten(self._text)}") from None
        return super().read(name)

    def __repr__(self) -> str:
        return f"{len(self._text):,} characters of Base64"


class _Member(PictureValue):
    """A picture in a tar file, whose digest has it."""

    version = None

    def __init__(self, reader: RowPictures, member: TarMember) -> None:
        self._reader, self._member = reader, member

    def read(self, name: str) -> str:
        from embedtrain.data.images.files import Place

        member = self._member
        place = Place(os.path.abspath(local_path(member.file)), member.offset, member.length)
        return self._reader.read_place(place, f"{name} is the member {shorten(member.name, 200)}, and ")

    def __repr__(self) -> str:
        return shorten(self._member.name)


class _Mixed(PictureValue):
    """A text and its pictures, which stand where the text has <|image_1|>, else before it."""

    def __init__(self, text: str, pictures: list[PictureValue]) -> None:
        self._text, self._pictures = text, pictures
        self.is_url = any(picture.is_url for picture in pictures)

    def read(self, name: str) -> str:
        return with_pictures(_SLOT.sub("<|image|>", self._text), self._pictures, "<|image|>", name)

    @property
    def version(self) -> object:
        return [picture.version for picture in self._pictures]

    def __repr__(self) -> str:
        return f"{shorten(self._text)} with {self._pictures!r}"


def pictures_version(rows: Iterable[Mapping[str, Any]]) -> object:
    """What caches of rows with pictures depend on besides the file of the rows, as JSON; None without pictures.

    Of some rows: whoever replaces a picture later is told when it is decoded.
    """
    versions = [picture.version for row in rows for value in row.values() for picture in picture_values(value)]
    if not versions:
        return None
    if find_spec("PIL") is None:  # an error where a picture is used
        return versions
    from embedtrain.data.images.files import image_identity

    return [image_identity(), versions]


# Items that leave the process.


def shown_item(item: str) -> str:
    """An item for people: `[picture 640x480 photos/cat.jpg]` for a picture."""
    if MARK not in item:
        return item
    if has_chunks(item):
        return described(item)
    return "".join(_shown_picture(part) if isinstance(part, Picture) else plain(part) for part in item_parts(item))


def _shown_picture(picture: Picture) -> str:
    return f"[{f'picture {picture.width}x{picture.height} {file_of_picture(picture)}'.rstrip()}]"


def file_of_picture(picture: Picture) -> str:
    """The file that a picture is, for people; "" if it is unknown, or one of many in a file, which says nothing."""
    from embedtrain.data.images.files import PICTURES

    try:
        place = PICTURES.place(picture)
    except DataError:
        return ""
    return printable(place.file) if place.length is None else ""


def written_item(item: str, folder: Path) -> Any:
    """The value of an item in a row of a file in `folder`, which is read as the same item again.

    A text is itself. Else an object `{"text", "image"}`, or with several pictures `{"text", "images"}`, or with a text
    before a picture `{"content": [parts]}`. A picture is named relative to `folder`: it is there, or a link to its file
    is made in `folder/images`, or the file itself where it has been a part of another file. Callable on any rank. A
    document in chunks is `{"chunks", "chunk"}`.
    """
    if has_chunks(item):
        chunks, answers = chunks_of(item)
        return {"chunks": chunks} | ({"chunk": answers[0] if len(answers) == 1 else answers} if answers else {})
    if not has_pictures(item):
        return item
    parts = [part if isinstance(part, str) else {"image": _written_picture(part, folder)} for part in item_parts(item)]
    pictures = [part["image"] for part in parts if isinstance(part, dict)]
    if not any(isinstance(part, str) for part in parts[: len(pictures)]):
        text = {"text": parts[-1]} if len(parts) > len(pictures) else {}
        return text | ({"image": pictures[0]} if len(pictures) == 1 else {"images": pictures})
    written = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} | part for part in parts]
    return {"content": written}


def _written_picture(picture: Picture, folder: Path) -> str:
    from embedtrain.data.images.files import PICTURES, read_bytes, read_header

    place = PICTURES.place(picture)
    root = os.path.abspath(folder)
    is_whole = place.offset == 0 and place.length is None
    if is_whole and os.path.abspath(place.file).startswith(root + os.sep):
        return os.path.relpath(place.file, root)
    suffix = os.path.splitext(place.file)[1].lower() if is_whole else ""
    suffix = suffix if suffix in SUFFIXES else f".{read_header(place).format.lower()}"
    relative = os.path.join(LINKED_FOLDER, f"{picture.key:016x}{suffix}")
    target = Path(root, relative)
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_whole:
            with contextlib.suppress(FileExistsError):  # another rank makes the same link
                target.symlink_to(os.path.abspath(place.file))
        else:
            # Of `atomic_write`, each call would go through all pictures that are there.
            unfinished = target.with_name(f".{target.name}.{os.getpid()}")
            unfinished.write_bytes(read_bytes(place))
            unfinished.replace(target)
    return relative
