"""Where pictures are, what the header of a file says about one, and its pixels.

A picture is known by the header of its file: size, orientation, format. Its pixels are read when a chunk needs them,
by the threads that prepare batches, and are never stored.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.columns import DEFAULT_MAX_PIXELS, LARGEST_MAX_PIXELS
from embedtrain.data.cache.cache import JOINED, map_array, write_array
from embedtrain.data.images.item import Picture
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.files import reading, remove_tree
from embedtrain.utils.formatting import format_bytes, format_count, install_command, one_line, printable

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FILE_BYTES = 1 << 30
TABLE = "pictures"  # the folder of a PictureTable in that of what is cached
# Formats whose header has the size. Pillow reads more, some by starting programs (EPS) or without any check.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF")
_WIDE_GREYS = ("I;16", "I;16B", "I;16L", "I;16N")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", *_WIDE_GREYS)
_ORIENTATION = 0x0112  # of EXIF and TIFF
# How the content of files that are no picture begins, without white space before it, and what they are.
_OTHER_CONTENT = (
    (rb"(?=.*<svg\b)<(svg|\?xml|!--|!doctype svg)", "a drawing (SVG): render it as PNG"),
    (rb"%PDF-", "a PDF document: render its pages as PNG"),
    (rb"<!doctype html|<html\b", "a web page (HTML), which servers send instead of a picture that they do not have"),
    (rb"version https://git-lfs", "a pointer of Git LFS: download the file with git lfs pull"),
    (rb"....ftyp(heic|heix|mif1)", "a HEIC picture: convert it to JPEG or PNG"),
)
# Errors of opening a file that are of its name or its rights; others are of a disk.
_MISSING = {errno.ENOENT, errno.ENOTDIR}
_OWN_ERRORS = {errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}


class BadPicture(DataError):
    """A file that is no picture, or not one that can be used. The message says why, and names no file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a picture are: a file, or a range of bytes in one, such as a member of a tar file."""

    file: str
    offset: int = 0
    length: int | None = None  # None: to the end of the file

    def __str__(self) -> str:
        """For messages, on one line."""
        if self.offset == 0 and self.length is None:
            return printable(self.file)
        end = "the end" if self.length is None else f"{self.offset + self.length:,}"
        return f"{printable(self.file)}, bytes {self.offset:,} to {end}"


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a picture before its pixels are read.

    Attributes:
        format: Pillow's name: JPEG, PNG, ...
        has_more_frames: whether it is an animation or has several pages, of which the first is used.
    """

    picture: Picture
    format: str
    has_more_frames: bool


def read_picture(place: Place, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Picture:
    """The picture at a place; raises as `read_header`."""
    return read_header(place, max_pixels=max_pixels).picture


def read_header(place: Place, *, max_pixels: int = DEFAULT_MAX_PIXELS, key_of_place: bool = False) -> Header:
    """Read the header of a picture and hash its bytes, without decoding a pixel; callable from any thread.

    The size is that after the orientation of EXIF or XMP, which counts in JPEG, WebP, TIFF and AVIF, and in PNG where
    it stands before the pixels. Pillow would decode a whole PNG to look for it behind them.

    Args:
        max_pixels: width times height above which a picture is refused, at most LARGEST_MAX_PIXELS.
        key_of_place: the key is that of the place, not of the bytes, of which only the first are read. Then copies of
            a picture are different pictures, and a changed one is recognised by its size alone.

    Raises:
        BadPicture: the file is missing, no picture, damaged in its header, too large, or has no grey levels or colours
            that are defined.
        UnreadableError: the disk fails.
    """
    if not key_of_place:
        return header_of(read_bytes(place), max_pixels=max_pixels)
    with _opened(place) as (file, _):
        return _header(_open(file), place_key(place), max_pixels)


def header_of(data: bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Header:
    """The header of a picture whose file has these bytes; raises as `read_header`."""
    return _header(_open(io.BytesIO(data)), content_key(data), max_pixels)


def _header(image: "Image", key: int, max_pixels: int) -> Header:
    width, height = _upright_size(image)
    if width < 1 or height < 1:
        raise BadPicture(f"it has no pixels: {width} x {height}")
    if width * height > max_pixels:
        more = f", or write max_image_pixels, at most {LARGEST_MAX_PIXELS:,}" if max_pixels < LARGEST_MAX_PIXELS else ""
        size = f"{width} x {height} = {width * height:,} pixels"
        raise BadPicture(f"it has {size}, more than the {max_pixels:,} allowed: resize it{more}")
    if image.mode not in _MODES:
        raise BadPicture(f"its pixels (Pillow's mode {image.mode}) have no defined range of grey levels or colours")
    return Header(Picture(key, width, height), str(image.format), _has_more_frames(image))


def content_key(data: bytes) -> int:
    """The key of a picture: of its file's bytes, 63 bits, as `text_key` computes it of a text."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def place_key(place: Place) -> int:
    """The key of a picture whose bytes are not hashed."""
    return content_key(b"%d %s %s" % (place.offset, str(place.length).encode(), os.fsencode(place.file)))


def decode_picture(place: Place, picture: Picture) -> "Image":
    """The pixels of a picture: RGB, upright, on white where it is transparent, the first frame.

    Greys of 16 bits keep their upper 8; Pillow alone makes everything above 255 white. Callable from any thread.

    Raises:
        DataError: names the file if it is missing, damaged, or not the one that `picture` was read from.
        UnreadableError: the disk fails.
    """
    try:
        data = read_bytes(place)
        if picture.key != place_key(place) and picture.key != content_key(data):
            PICTURES.discard(picture)
            raise BadPicture("it has changed since the data was prepared: start again, and the data is prepared again")
        image = _open(io.BytesIO(data))
        if _upright_size(image) != (picture.width, picture.height):
            width, height = _upright_size(image)
            was = f"{picture.width} x {picture.height}"
            PICTURES.discard(picture)
            raise BadPicture(f"it is {width} x {height}, but was {was}: start again, and the data is prepared again")
        # Before the pixels are read, which may find a second one behind them. Pillow turns TIFF itself.
        turn = 1 if image.format == "TIFF" else _orientation(image)
        try:
            image.load()
            upright = _turned(_rgb(image), turn)
        except MemoryError:
            raise
        except Exception as error:  # damaged pixels may raise anything
            raise BadPicture(f"its pixels cannot be decoded ({one_line(error)}): replace the file") from None
    except BadPicture as error:
        raise DataError(f"{place}: {error}") from None
    return upright


class PictureTable:
    """The places of pictures by their keys, memory-mapped: 24 bytes a picture, beside the names of files.

    A folder has `keys.bin`, int64 [N], sorted; `places.bin`, [N] of file number, length (0: to the end of the file) and
    offset; `names.bin`, the names of all files; and `name_ends.bin`, int64 [files], where they end. With `roots`, a
    name that is not absolute begins with the number of one of these folders: data and caches are moved.
    """

    _PLACE = np.dtype([("file", "<u4"), ("length", "<u4"), ("offset", "<i8")])

    def __init__(self, directory: Path, roots: Sequence[str] = ()) -> None:
        self.roots = tuple(roots)
        try:
            self._keys = map_array(directory / "keys.bin", np.int64)
            self._places = map_array(directory / "places.bin", self._PLACE)
            self._names = map_array(directory / "names.bin", np.uint8)
            self._name_ends = map_array(directory / "name_ends.bin", np.int64)
        except (OSError, ValueError) as error:
            raise DataError(f"{directory}: the places of pictures cannot be opened: {one_line(error)}") from None

    @classmethod
    def write(cls, directory: Path, places: Mapping[int, Place]) -> None:
        """Write a table into an existing folder."""
        keys = np.sort(np.fromiter(places, dtype=np.int64, count=len(places)))
        rows: NDArray[Any] = np.empty(len(keys), dtype=cls._PLACE)
        numbers: dict[str, int] = {}
        for row, key in enumerate(keys.tolist()):
            place = places[key]
            rows[row] = (numbers.setdefault(place.file, len(numbers)), place.length or 0, place.offset)
        names = [os.fsencode(name) for name in numbers]
        write_array(directory / "keys.bin", keys)
        write_array(directory / "places.bin", rows.view(np.uint8))
        write_array(directory / "names.bin", np.frombuffer(b"".join(names), dtype=np.uint8))
        write_array(directory / "name_ends.bin", np.cumsum([len(name) for name in names], dtype=np.int64))

    @classmethod
    def join(cls, pieces: Sequence[Path], to: Path) -> None:
        """Write the table of the pictures of all pieces, if they have any, into the folder `to`."""
        tables = [cls(piece / TABLE) for piece in pieces if (piece / TABLE).is_dir()]
        if not tables:
            return
        to = to / TABLE
        to.mkdir()
        first_files = np.cumsum([0, *(len(table._name_ends) for table in tables)])
        first_bytes = np.cumsum([0, *(len(table._names) for table in tables)])
        places = np.concatenate([table._places for table in tables])
        places["file"] += np.repeat(first_files[:-1], [len(table) for table in tables]).astype(np.uint32)
        ends = [table._name_ends + start for table, start in zip(tables, first_bytes[:-1], strict=True)]
        keys, rows = np.unique(np.concatenate([table._keys for table in tables]), return_index=True)
        write_array(to / "keys.bin", keys)
        write_array(to / "places.bin", places[rows].view(np.uint8))
        write_array(to / "names.bin", np.concatenate([table._names for table in tables]))
        write_array(to / "name_ends.bin", np.concatenate(ends))

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: int) -> Place | None:
        """The place of a picture, or None."""
        row = int(self._keys.searchsorted(key))
        if row == len(self._keys) or self._keys[row] != key:
            return None
        file, length, offset = self._places[row].item()
        start = int(self._name_ends[file - 1]) if file else 0
        name = os.fsdecode(self._names[start : int(self._name_ends[file])].tobytes())
        if self.roots and not os.path.isabs(name):
            root, _, inside = name.partition("/")
            name = os.path.join(self.roots[int(root)], inside)
        return Place(name, offset, length or None)


class PictureWriter:
    """Writes the pictures of one piece of data into its folder: their table, and the bytes of those without a file.

    Args:
        directory: the folder of the piece, whose parent is the first of the table's roots.
        root, folder: the number among the roots, and the path, of the folder that has the files of the user.
    """

    BYTES = "pictures.bin"  # the files of pictures that were values of rows, one after the other

    def __init__(self, directory: Path, root: int, folder: str | None) -> None:
        self.num_animated = 0
        self._directory, self._root, self._folder = directory, root, folder
        self._places: dict[int, Place] = {}
        self._file: BinaryIO | None = None

    def add_file(self, header: Header, place: Place) -> None:
        """Add a picture in a file of the user."""
        assert self._folder is not None
        inside = place.file.removeprefix(self._folder).lstrip(os.sep)
        self._add(header, Place(f"{self._root}/{inside}", place.offset, place.length))

    def add_bytes(self, header: Header, data: bytes) -> None:
        """Add a picture whose file has these bytes, and write them."""
        if header.picture.key in self._places:
            return
        if self._file is None:
            self._file = (self._directory / self.BYTES).open("wb")
        self._add(header, Place(f"0/{self._directory.name}/{self.BYTES}", self._file.tell(), len(data)))
        self._file.write(data)

    def _add(self, header: Header, place: Place) -> None:
        if header.picture.key not in self._places:
            self._places[header.picture.key] = place
            self.num_animated += header.has_more_frames

    def close(self) -> None:
        """Write the table."""
        if self._file is not None:
            self._file.close()
        if self._places:
            (self._directory / TABLE).mkdir()
            PictureTable.write(self._directory / TABLE, self._places)


class KnownPictures:
    """The places of all pictures that this process has read: readers add to it, decoding asks it."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._tables: dict[Path, PictureTable] = {}
        self._lock = threading.Lock()
        self._copies: Any = None  # a temporary file

    def add(self, picture: Picture, place: Place) -> None:
        """Remember a picture. Of equal pictures in several files the last is read."""
        self._places[picture.key] = place

    def lend(self, picture: Picture, place: Place) -> bool:
        """Remember a picture whose place is there until `take_back`, unless a place is known; whether it was not."""
        with contextlib.suppress(DataError):
            self.place(picture)
            return False
        self.add(picture, place)
        return True

    def take_back(self, picture: Picture) -> None:
        """Forget the place of a picture that was lent."""
        self._places.pop(picture.key, None)

    def add_file(self, header: Header, place: Place) -> None:
        """Remember a picture in a file."""
        self.add(header.picture, place)

    def add_bytes(self, header: Header, data: bytes) -> None:
        """Remember a picture whose file has these bytes, which are kept on disk until this process ends."""
        with self._lock:
            if header.picture.key in self._places:
                return
            if self._copies is None:
                self._copies = tempfile.NamedTemporaryFile(prefix="embedtrain-pictures-")  # noqa: SIM115
            place = Place(self._copies.name, self._copies.tell(), len(data))
            self._copies.write(data)
            self._copies.flush()
            self.add(header.picture, place)

    def add_table(self, directory: Path, roots: Sequence[str] = ()) -> PictureTable:
        """Open the table of a folder, once; `roots` are the folders that its names are relative to."""
        with self._lock:
            known = self._tables.get(directory)
            if known is None or known.roots != tuple(roots):
                # Replaced, not changed: `place` may be going through it.
                self._tables = {**self._tables, directory: PictureTable(directory, roots)}
            return self._tables[directory]

    def discard(self, picture: Picture) -> None:
        """Remove what is cached with a picture that is no longer the same, so that the next start prepares it again."""
        for directory, table in self._tables.items():
            # Only what is surely a folder of the cache: `joined/pictures` in it.
            if directory.parts[-2:] == (JOINED, TABLE) and table.get(picture.key) is not None:
                remove_tree(directory.parent.parent)

    def place(self, picture: Picture) -> Place:
        """Where a picture is; DataError if this process has read no file with it."""
        if (place := self._places.get(picture.key)) is not None:
            return place
        for table in reversed(self._tables.values()):
            if (place := table.get(picture.key)) is not None:
                return place
        size = f"{picture.width}x{picture.height}"
        raise DataError(f"picture {picture.key:016x} ({size}) is in no file that this command has read")


PICTURES = KnownPictures()


@cache
def image_identity() -> str:
    """The versions that pixels depend on: Pillow and the libraries that it decodes with."""
    pillow()
    import PIL
    from PIL import features

    names = ("libjpeg_turbo", "jpg", "zlib_ng", "zlib", "webp", "libtiff", "jpg_2000", "avif")
    versions = {name: features.version(name) for name in names}
    found = (f"{name} {version}" for name, version in versions.items() if version)
    return ", ".join([f"Pillow {PIL.__version__}", *found])


@cache
def pillow() -> Any:
    """The module PIL.Image, with the formats that are read; ConfigError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(f"images need Pillow: {install_command('images')}") from None
    # Imported here, once: `Image.open` would import all plugins, which several threads may not begin together.
    from PIL import (  # noqa: F401
        AvifImagePlugin,
        BmpImagePlugin,
        GifImagePlugin,
        Jpeg2KImagePlugin,
        JpegImagePlugin,
        MpoImagePlugin,  # several JPEGs
        PngImagePlugin,
        PpmImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    # Of large pictures and damaged metadata, which are either errors here or do not matter.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def read_bytes(place: Place) -> bytes:
    """The bytes at a place; raises as `read_header`."""
    with _opened(place) as (file, length):
        return file.read(length)  # without the number, in steps of 8 KiB


@contextlib.contextmanager
def _opened(place: Place) -> Iterator[tuple[BinaryIO, int]]:
    """A file that begins and ends with the bytes at a place, of a regular file, and how many these should be."""
    with reading(Path(place.file)), contextlib.ExitStack() as stack:
        try:
            status = os.stat(place.file)
            if not stat.S_ISREG(status.st_mode):
                raise BadPicture("it is no file, but a folder or a device")
            whole = stack.enter_context(open(place.file, "rb", buffering=0))
        except ValueError:
            raise BadPicture("it cannot be read: its name has a null character") from None
        except OSError as error:
            if error.errno in _MISSING:
                raise BadPicture("it does not exist") from None
            if error.errno in _OWN_ERRORS:
                raise BadPicture(f"it cannot be read: {error.strerror}") from None
            raise
        length = status.st_size - place.offset if place.length is None else place.length
        if length <= 0:
            raise BadPicture("it is empty")
        if (missing := place.offset + length - status.st_size) > 0:
            raise BadPicture(f"the file ends {format_count(missing, 'byte')} before it does")
        if length > MAX_FILE_BYTES:
            raise BadPicture(f"it has {format_bytes(length)}, more than {format_bytes(MAX_FILE_BYTES)}")
        yield stack.enter_context(io.BufferedReader(_Range(whole, place.offset, length))), length


class _Range(io.RawIOBase):
    """A range of bytes of an open file, as a file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._position)])
        self._position += count
        return count


def _open(file: BinaryIO) -> "Image":
    """The picture in a file, of which only the header is read."""
    module = pillow()
    try:
        image: Image = module.open(file, formats=_FORMATS)
    except module.UnidentifiedImageError:
        file.seek(0)
        raise BadPicture(_what_else(file.read(4096))) from None
    except module.DecompressionBombError:
        raise BadPicture(f"it has more than the {LARGEST_MAX_PIXELS:,} pixels that Pillow opens: resize it") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged header may raise anything
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise BadPicture(f"its header is damaged: {one_line(error)}") from None
    return image


def _what_else(start: bytes) -> str:
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    for pattern, name in _OTHER_CONTENT:
        if re.match(pattern, start, re.IGNORECASE | re.DOTALL):
            return f"it is {name}"
    return "it is no picture that Pillow can read, or its header is damaged"


def _orientation(image: "Image") -> int:
    """How the stored pixels are turned, 1 to 8 as in EXIF; 1 is upright, and where it cannot be read.

    Of a PNG, only what has been read: what stands before the pixels.
    """
    try:
        # The method of the base class: that of PNG decodes the pixels.
        value = pillow().Image.getexif(image).get(_ORIENTATION)
    except Exception:  # damaged metadata, which viewers ignore as well
        return 1
    return value if value in range(2, 9) else 1


def _upright_size(image: "Image") -> tuple[int, int]:
    width, height = image.size
    if image.format == "TIFF" and _ORIENTATION in getattr(image, "tag_v2", ()):  # Pillow has exchanged them
        return width, height
    return (height, width) if _orientation(image) >= 5 else (width, height)


def _has_more_frames(image: "Image") -> bool:
    try:
        return bool(getattr(image, "is_animated", False))  # not `n_frames`, which goes through the whole file
    except Exception:  # frames after the first may be damaged
        return False


def _rgb(image: "Image") -> "Image":
    """A decoded picture in RGB, composited on white as the image processors of transformers 5.23 do."""
    module = pillow()
    if image.mode in _WIDE_GREYS:
        image = module.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif "A" in image.getbands() or image.info.get("transparency") is not None:
        white = module.new("RGBA", image.size, (255, 255, 255, 255))
        image = module.alpha_composite(white, image if image.mode == "RGBA" else image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _turned(image: "Image", orientation: int) -> "Image":
    if orientation == 1:
        return image
    turns = pillow().Transpose
    methods = (
        turns.FLIP_LEFT_RIGHT, turns.ROTATE_180, turns.FLIP_TOP_BOTTOM, turns.TRANSPOSE, turns.ROTATE_270,
        turns.TRANSVERSE, turns.ROTATE_90,
    )  # fmt: skip
    return image.transpose(methods[orientation - 2])
