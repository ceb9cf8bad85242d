"""Documents that a row names by id, looked up in the corpus, and objects that hold a document themselves."""

from collections.abc import Sequence
from typing import Any

from embedtrain.data.sources import values
from embedtrain.data.sources.layouts.layout import DocumentLookup
from embedtrain.data.sources.problems import BadRow, told


def looked_up(names: Sequence[str], what: str, documents: DocumentLookup | None) -> list[str]:
    """The texts of documents.

    Args:
        names: their ids.
        what: where the row names them, for messages.
        documents: the corpus.

    Raises:
        BadRow: the corpus has no such document, or one without a text.
    """
    if documents is None:
        raise BadRow(
            f"{what} names documents by id, and the source's first rows do not: "
            "write data.train=[{path: ..., documents: FILE}], where FILE holds their texts"
        )
    texts = []
    for name in names:
        text = documents.text(name)
        if text is None:
            raise BadRow(f'{what} names "{name}", and the corpus has no such document')
        if not text.strip():
            raise BadRow(f'{what} names "{name}", and that document has no text')
        texts.append(text)
    return texts


def ids(value: object, what: str) -> list[str]:
    """A list of ids; null is none."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"{what} must be a list of ids, not {told(value)}")
    found = [values.identifier(element, f"element {i} of {what}") for i, element in enumerate(value, 1)]
    if "" in found:
        raise BadRow(f"element {found.index('') + 1} of {what} is empty, and should name a document")
    return found


def passages(value: object, what: str, id_key: str) -> tuple[list[str], list[str]]:
    """Texts and ids of a list of objects with `text`, perhaps `title`, and an id; no ids where none has one."""
    if value is None:
        return [], []
    if not isinstance(value, list):
        raise BadRow(f"{what} must be a list of objects with a text, not {told(value)}")
    texts: list[str] = []
    names: list[str] = []
    for i, element in enumerate(value, 1):
        name = f"element {i} of {what}"
        if not isinstance(element, dict):
            raise BadRow(f"{name} must be an object with a text, not {told(element)}")
        refuse_images(element, name)
        texts.append(values.text(values.titled(element.get("title"), element.get("text"), f'"text" of {name}'), name))
        names.append(values.identifier(element.get(id_key), f'"{id_key}" of {name}'))
    return texts, names if any(names) else []


def refuse_images(row: dict[str, Any], what: str) -> None:
    """Refuse what is to be seen or heard: texts alone are trained on."""
    for key, value in row.items():
        # Compared with the last word of a key, such as query_image: `imagery` may be a text.
        if value and key.rpartition("_")[2] in ("image", "images", "video", "videos", "audio", "audios"):
            raise BadRow(f'{what} has "{key}": texts alone are trained on')
