"""Documents of a corpus: the one reader for training, evaluation and mining."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from embedtrain.data.sources import values
from embedtrain.data.sources.column_roles import is_id, normalized
from embedtrain.data.sources.part_reader import PartReader, Piece
from embedtrain.data.sources.parts import Part
from embedtrain.data.sources.values import BadRow, list_names

_ID_KEYS = ("docid", "_id", "id", "doc_id", "document_id", "pid")


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is stored. Title and text may be empty."""

    id: str  # "" for none
    title: str
    text: str

    @property
    def full_text(self) -> str:
        """The title and the text, joined as BEIR, mteb and Tevatron do."""
        return f"{self.title} {self.text}".strip()


def parse_document(row: dict[str, Any], *, id_required: bool = True) -> Document:
    """The document of a row with an id, a text and perhaps a title. Raises BadRow if it lacks one."""
    id_key = next((key for key in _ID_KEYS if key in row), None) or next(filter(is_id, row), None)
    if id_key is None and id_required:
        raise BadRow(f'a document needs an id ("docid" or "_id"), and this one has: {list_names(row)}')
    name = "" if id_key is None else values.identifier(row[id_key], f'"{id_key}"')
    if not name and id_required:
        raise BadRow(f'"{id_key}" is empty, and a document needs an id')
    text_key = next((key for key in values.TEXT_KEYS if key in row), None)
    text_key = text_key or next((key for key in row if normalized(key) in values.TEXT_KEYS), None)
    title_key = next((key for key in row if key.lower() == "title"), "title")
    if text_key is None and title_key not in row:
        raise BadRow(f'a document needs a "text", and this one has: {list_names(row)}')
    title = values.optional_string(row.get(title_key), f'"{title_key}"')
    return Document(name, title, values.optional_string(row.get(text_key or "text"), f'"{text_key}"'))


class DocumentReader:
    """Reads the documents of a corpus. Every method raises DataError where a part is gone or cannot be read."""

    document_parts: Sequence[Part] = ()  # a corpus has no corpus

    def __init__(self, parts: Sequence[Part], name: str, *, ids_required: bool = True) -> None:
        self.parts, self.name = parts, name
        self._ids_required = ids_required
        self._reader = PartReader()

    def content(self) -> dict[str, Any]:
        """Digests of the parts."""
        return {"parts": [self._reader.digests(part) for part in self.parts], "documents": []}

    def pieces(self, piece_bytes: int) -> list[Piece]:
        """All parts in order, in pieces of about this size."""
        return [piece for part in self.parts for piece in self._reader.split(part, piece_bytes)]

    def documents(self, piece: Piece) -> Iterator[tuple[int, Document | BadRow]]:
        """The documents of a piece with their line or row numbers within it."""
        for line in self._reader.lines(piece):
            if line.row is None:
                continue
            try:
                if isinstance(line.row, BadRow):
                    raise line.row
                yield line.number, parse_document(line.row, id_required=self._ids_required)
            except BadRow as bad:
                yield line.number, bad

    def location(self, piece: Piece, line: int) -> str:
        """A document's location for messages, by its line or row number within the piece."""
        return piece.part.location(self._reader.lines_before(piece) + line)
