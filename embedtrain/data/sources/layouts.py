"""The interface of row layouts, and what several of them share: documents looked up by id, lists of passages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from embedtrain.config.losses import LOSSES, CombinedConfig, SentenceTransformersConfig
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement, row_requirements
from embedtrain.data.rows import Documents, Example, take
from embedtrain.data.sources import values
from embedtrain.data.sources.column_roles import is_negative, is_positive
from embedtrain.data.sources.values import BadRow, describe_value, list_names

T = TypeVar("T")

TEXTS_ONLY = RowRequirements()  # a query and a positive: what most losses need


class DocumentLookup(Protocol):
    """Example of documents by id."""

    def text(self, name: str) -> str | None:
        """The document's title and text; None where there is no such document."""
        ...


@dataclass
class RowLayout(ABC):
    """How rows of one layout are parsed. What optional values the rows have is collected for the report."""

    name: ClassVar[str]
    needs: RowRequirements = TEXTS_ONLY
    # Optional values that are used and names of values that are not: sets in the order of first occurrence.
    features: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Example:
        """The texts of a row, and the values besides them that the loss needs. Raises BadRow if it cannot be used."""
        texts = _drop_repeated_negatives(self._parse(row, documents))
        return self._only_negatives(texts) if self.needs.lists and not texts.positives else texts

    def describe(self) -> str:
        """A phrase for the report: the layout and the optional values found in its rows."""
        *first, last = self.features or [""]
        return f"{self.name} with {', '.join(first)}{' and ' if first else ''}{last}" if self.features else self.name

    @abstractmethod
    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example: ...

    def _require_positives(self, positives: Sequence[object], key: str) -> None:
        """Reject a row without positives, which only losses of all documents of a row can use."""
        if not positives and not self.needs.lists:
            raise BadRow(f"{key} is empty: a row needs at least one positive")

    def _only_negatives(self, texts: Example) -> Example:
        """A row without positives as a list of documents with scores, which are 0 if it has none."""
        documents = texts.negatives
        if not documents:
            raise BadRow("this row has neither positives nor negatives")
        if not documents.scores and self.needs.scores is ScoreRequirement.pairs:
            documents = replace(documents, scores=(0.0,) * len(documents))
        return replace(texts, positives=documents, negatives=Documents())

    def _ignore_except(self, row: dict[str, Any], *keys: str) -> None:
        for key, value in row.items():
            if key in keys or key in self.ignored:
                continue
            if value is not None and value not in ("", []):
                self._require_no_role(key, value)
            elif is_negative(key) or is_positive(key):  # a later row may have one
                continue
            self.ignored[key] = None

    def _require_no_role(self, name: str, value: object) -> None:
        """Reject a value that is not used although its name can only be that of a positive or of negatives."""
        role = "negatives" if is_negative(name) else "positives" if is_positive(name) else None
        if role is not None and not isinstance(value, bool | int | float):
            raise BadRow(
                f'"{name}" would not be used, and by its name it holds {role}: name the columns, such as '
                "columns=[QUERY,POSITIVE,...], or rename or remove it"
            )


def _drop_repeated_negatives(texts: Example) -> Example:
    """The row without negatives that are positives or repeat another negative, nor their scores, ids and vectors."""
    first_indices: dict[str, int] = {}
    for index, text in enumerate(texts.negatives.texts):
        if text not in texts.positives.texts:
            first_indices.setdefault(text, index)
    if len(first_indices) == len(texts.negatives):
        return texts
    first, num_others = list(first_indices.values()), 1 + len(texts.positives)
    return replace(
        texts,
        negatives=texts.negatives.take(first),
        num_dropped=len(texts.negatives) - len(first),
        vectors=(*texts.vectors[:num_others], *take(texts.vectors[num_others:], first)),
    )


def needs_besides_texts(needs: RowRequirements) -> str:
    """What the loss needs besides texts, for messages."""
    if needs.label:
        return "the class of every row"
    if needs.vectors:
        return "a teacher's vectors of every text"
    return (
        "a teacher's score of every document"
        if needs.scores == ScoreRequirement.teacher
        else "a score of every document"
    )


def losses_with_scores() -> str:
    """The values of `loss` that use scores of pairs, for messages."""
    kinds = [kind for kind in LOSSES.values() if kind not in (CombinedConfig, SentenceTransformersConfig)]
    needs = [row_requirements(kind()) for kind in kinds]
    return ", ".join(need.loss for need in needs if need.scores == ScoreRequirement.pairs)


def require_keys(row: dict[str, Any], *keys: str) -> None:
    """Reject a row that lacks one of these keys."""
    for key in keys:
        if key not in row:
            raise BadRow(f'no "{key}" in this row, which has: {list_names(row)}')


def reject_media(row: dict[str, Any], name: str) -> None:
    """Reject images, videos and audio: only texts are trained on."""
    for key, value in row.items():
        # The last word of a key such as query_image decides: `imagery` may be a text.
        if value and key.rpartition("_")[2] in ("image", "images", "video", "videos", "audio", "audios"):
            raise BadRow(f'{name} has "{key}": only texts are trained on')


def lookup_texts(ids: Sequence[str], name: str, documents: DocumentLookup | None) -> tuple[str, ...]:
    """The texts of documents by id. Raises BadRow if the corpus lacks a document, or its text is empty."""
    if documents is None:
        raise BadRow(
            f"{name} names documents by id, and the source's first rows do not: "
            "write data.train=[{path: ..., documents: FILE}], where FILE holds their texts"
        )
    texts = []
    for document_id in ids:
        text = documents.text(document_id)
        if text is None:
            raise BadRow(f'{name} names "{document_id}", and the corpus has no such document')
        if not text.strip():
            raise BadRow(f'{name} names "{document_id}", and that document has no text')
        texts.append(text)
    return tuple(texts)


def id_list(value: object, name: str) -> list[str]:
    """A list of ids; empty for null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list of ids, not {describe_value(value)}")
    ids = [values.identifier(element, f"element {i} of {name}") for i, element in enumerate(value, 1)]
    if "" in ids:
        raise BadRow(f"element {ids.index('') + 1} of {name} is empty and must be the id of a document")
    return ids


def passages(value: object, name: str, id_key: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Example and ids of a list of objects with `text` and perhaps `title` and an id; no ids where none has one."""
    if value is None:
        return (), ()
    if not isinstance(value, list):
        raise BadRow(f"{name} must be a list of objects with a text, not {describe_value(value)}")
    texts: list[str] = []
    ids: list[str] = []
    for i, element in enumerate(value, 1):
        location = f"element {i} of {name}"
        if not isinstance(element, dict):
            raise BadRow(f"{location} must be an object with a text, not {describe_value(element)}")
        reject_media(element, location)
        texts.append(values.text(element, location))
        ids.append(values.identifier(element.get(id_key), f'"{id_key}" of {location}'))
    return tuple(texts), tuple(ids) if any(ids) else ()
