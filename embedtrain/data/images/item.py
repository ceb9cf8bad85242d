"""Items: texts in which pictures stand as references, and documents in chunks.

A reference has the content's key and the picture's size, never a path: equal pictures are equal texts wherever their
files are, the length of an item is known without opening a file, and a text that only looks like a reference can name
nothing but a picture that this process has read. `PICTURES` in `files.py` knows where the pictures are.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A noncharacter, which Unicode reserves for use within a program. Texts that are read do not have it, see `plain`.
MARK = "\ufdd0"
_REFERENCE = re.compile(f"{MARK}([0-9a-f]{{16}}) ([1-9][0-9]{{0,9}})x([1-9][0-9]{{0,9}}){MARK}")
# Before each chunk of a document in chunks; the second is that of a chunk that answers the query of the row.
_CHUNK, _ANSWER = f"{MARK}chunk{MARK}", f"{MARK}answer{MARK}"
_ANY_CHUNK = re.compile(f"({_CHUNK}|{_ANSWER})")


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that is known by the header of its file.

    Attributes:
        key: of the file's bytes, 63 bits, as `text_key` computes it of a text.
        width, height: pixels, as the picture is shown: after the orientation that its file names.
    """

    key: int
    width: int
    height: int

    def __str__(self) -> str:
        """The reference that stands for it in an item."""
        return f"{MARK}{self.key:016x} {self.width}x{self.height}{MARK}"


def has_pictures(item: str) -> bool:
    """Whether an item has a picture."""
    return MARK in item and _REFERENCE.search(item) is not None


def pictures_of(item: str) -> list[Picture]:
    """The pictures of an item, in order."""
    return [part for part in item_parts(item) if isinstance(part, Picture)]


def item_parts(item: str) -> list[str | Picture]:
    """The texts and the pictures of an item, in order; no text is empty."""
    if MARK not in item:
        return [item] if item else []
    parts: list[str | Picture] = []
    start = 0
    for found in _REFERENCE.finditer(item):
        parts += [item[start : found.start()], Picture(int(found[1], 16), int(found[2]), int(found[3]))]
        start = found.end()
    return [part for part in (*parts, item[start:]) if part != ""]


def join_parts(parts: Iterable[str | Picture]) -> str:
    """The item of these texts and pictures."""
    return "".join(plain(part) if isinstance(part, str) else str(part) for part in parts)


def join_chunks(chunks: Sequence[str], answers: Sequence[int] = ()) -> str:
    """The item of a document in chunks, of which `answers` have the numbers of those that answer a query.

    A document of one chunk is the text.
    """
    if len(chunks) == 1:
        return plain(chunks[0])
    return "".join((_ANSWER if i in answers else _CHUNK) + plain(chunk) for i, chunk in enumerate(chunks))


def has_chunks(item: str) -> bool:
    """Whether an item is a document in chunks."""
    return MARK in item and _ANY_CHUNK.search(item) is not None


def chunks_of(item: str) -> tuple[list[str], list[int]]:
    """The chunks of an item, and the numbers of those that answer a query; what is before the first belongs to it.

    A text that is not in chunks is one.
    """
    if MARK not in item:
        return [item], []
    before, *parts = _ANY_CHUNK.split(item)
    if not parts:
        return [before], []
    chunks = parts[1::2]
    return [before + chunks[0], *chunks[1:]], [i for i, mark in enumerate(parts[::2]) if mark == _ANSWER]


def without_answers(item: str) -> str:
    """A document in chunks, none of which is said to answer a query."""
    return item.replace(_ANSWER, _CHUNK) if MARK in item else item


def described(item: str) -> str:
    """An item for messages, `[picture 640x480]` for a picture and ` | ` between chunks."""
    if has_chunks(item):
        return " | ".join(chunks_of(item)[0])
    parts = item_parts(item)
    return "".join(f"[picture {part.width}x{part.height}]" if isinstance(part, Picture) else part for part in parts)


def plain(text: str) -> str:
    """A text of a user without the character that marks references."""
    return text.replace(MARK, "\ufffd") if MARK in text else text
