"""Renders pictures of training data as one HTML file without external resources: a contact sheet."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from embedtrain import __version__
from embedtrain.data.images.item import Picture
from embedtrain.errors import DataError
from embedtrain.report.page import content_hash, page_file, template
from embedtrain.report.sample import thumbnail
from embedtrain.utils.files import atomic_write

_SIDE = 192  # pixels of a copy, twice that of the report: one tells whether a page is turned or blank


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A picture, in words; its copy, or why there is none."""

    file: str  # "" if many pictures are in one file
    row: str  # its location
    size: str  # in pixels, and in what the model computes
    thumbnail: str  # a data URI
    problem: str

    @classmethod
    def of(cls, picture: Picture, file: str, row: str, size: str) -> "ShownPicture":
        """Decodes the picture."""
        try:
            return cls(file, row, size, thumbnail(picture, _SIDE), "")
        except DataError as error:
            return cls(file, row, size, "", str(error))


@dataclass(frozen=True, slots=True)
class ShownSource:
    """The pictures of a source."""

    name: str
    sizes: Sequence[Sequence[str]]  # a table with its header
    num_refused: str  # in words; "" for none
    refused: Sequence[str]  # rows that cannot be used, some of them
    num_pictures: str  # different ones, in words
    pictures: Sequence[ShownPicture]


def write_contact_sheet(path: Path, sources: Sequence[ShownSource], note: str) -> None:
    """Write the page atomically; `note` says how the pictures were chosen."""
    style = page_file("page.css")
    content = template("pictures.html").render(
        sources=sources,
        note=note,
        created=time.strftime("%Y-%m-%d %H:%M"),
        version=__version__,
        style=Markup(style),  # noqa: S704  # our own file
        style_hash=content_hash(style),
    )
    with atomic_write(path) as temporary:
        # A name of a file need not be UTF-8.
        temporary.write_bytes(content.encode("utf-8", errors="replace"))
