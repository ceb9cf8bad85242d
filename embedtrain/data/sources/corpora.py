"""Documents that rows name by id: where their corpus lies, and its own rows."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from embedtrain.data.sources import values
from embedtrain.data.sources.files import raw_rows
from embedtrain.data.sources.kinds import Part, PartKind, path_of
from embedtrain.data.sources.problems import BadRow

_ROWS_LOOKED_AT = 16
_IDS = ("docid", "_id", "id", "doc_id", "document_id", "pid")
_TEXTS = ("text", "document_text", "contents", "passage")


def names_documents(row: dict[str, Any]) -> bool:
    """Whether a row names its documents by id, as Tevatron's second format and NeMo's do."""
    if "positive_document_ids" in row or "negative_document_ids" in row:
        return True
    documents = row.get("pos_doc")
    first = documents[0] if isinstance(documents, list) and documents else documents
    return isinstance(first, dict) and "id" in first and "text" not in first


def any_names_documents(parts: Sequence[Part], *, subset: str | None, split: str) -> bool:
    """Whether one of the first rows names documents by id: the very first may be a bad one.

    Raises:
        DataError: a part cannot be read as a whole.
    """
    rows = (row for part in parts for _, row in raw_rows(part, subset=subset, split=split, columns=None))
    return any(not isinstance(row, BadRow) and names_documents(row) for row in islice(rows, _ROWS_LOOKED_AT))


def beside(parts: Sequence[Part], name: str, files: Sequence[str]) -> list[str]:
    """Those of `files` that are called `name`..., or lie in a folder called so, beside the parts."""
    folders = {str(path_of(part.name).parent) for part in parts}
    found = []
    for file in files:
        path = path_of(file)
        own = path.name.startswith(name) and str(path.parent) in folders
        if own or any(parent.name.startswith(name) and str(parent.parent) in folders for parent in path.parents):
            found.append(file)
    return found


def document_rows(part: Part) -> Iterator[tuple[int, tuple[str, str] | BadRow]]:
    """The documents of one part of a corpus: (line, (id, text)). A text may be empty; a title comes before it.

    Raises:
        DataError: the part cannot be read as a whole.
    """
    for line, row in raw_rows(part, subset=None, split="train", columns=None):
        if isinstance(row, BadRow):
            yield line, row
            continue
        try:
            yield line, _document(row, from_cells=part.kind in (PartKind.csv, PartKind.tsv))
        except BadRow as bad:
            yield line, bad


def _document(row: dict[str, Any], *, from_cells: bool) -> tuple[str, str]:
    key = next((key for key in _IDS if key in row), None)
    if key is None:
        raise BadRow(f'a document needs an id ("{_IDS[0]}" or "{_IDS[1]}"), and this one has: {", ".join(row)}')
    name = values.identifier(row[key], f'"{key}"')
    if not name:
        raise BadRow(f'"{key}" is empty, and a document needs an id')
    of_text = next((key for key in _TEXTS if key in row), None)
    if of_text is None and "title" not in row and not from_cells:
        raise BadRow(f'a document needs a "text", and this one has: {", ".join(row)}')
    return name, values.titled(row.get("title"), row.get(of_text or "text"), f'"{of_text}"')
