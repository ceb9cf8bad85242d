"""NeMo Automodel's rows: a question, and documents as texts, as objects with a text, or by id."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.sources import values
from embedtrain.data.sources.layouts.layout import TEXTS_ONLY, DocumentLookup, require, with_found
from embedtrain.data.sources.layouts.named import ids, looked_up, passages
from embedtrain.data.sources.problems import BadRow
from embedtrain.data.types import Texts


@dataclass
class Nemo:
    """Rows `{"question" or "query": str, "pos_doc": ..., "neg_doc": ...}`.

    Documents are a text, a list of texts, objects `{"text", "id"?}`, or objects `{"id"}` of a corpus.
    https://github.com/NVIDIA-NeMo/Automodel
    """

    needs: RowRequirements = TEXTS_ONLY
    found: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Texts:
        """See Layout."""
        key = "query" if "query" in row else "question"
        require(row, key, "pos_doc")
        query = values.text(row[key], f'"{key}"')
        positives, positive_ids = self._documents(row["pos_doc"], '"pos_doc"', documents)
        negatives, negative_ids = self._documents(row.get("neg_doc"), '"neg_doc"', documents)
        if not positives:
            raise BadRow('"pos_doc" is empty: a row needs at least one positive')
        self.ignored.update((name, None) for name in row if name not in (key, "pos_doc", "neg_doc"))
        if positive_ids or negative_ids:
            self.found["ids"] = None
        return values.checked(query, positives, negatives, positive_ids=positive_ids, negative_ids=negative_ids)

    def told(self) -> str:
        """See Layout."""
        return with_found("NeMo rows", self.found)

    def _documents(self, value: Any, what: str, documents: DocumentLookup | None) -> tuple[list[str], list[str]]:
        if value is None:
            return [], []
        several = value if isinstance(value, list) else [value]
        if not any(isinstance(element, dict) for element in several):
            return values.texts(value, what), []
        if all(isinstance(element, dict) and "text" not in element for element in several):
            names = ids([element.get("id") for element in several], what)
            return looked_up(names, what, documents), names
        return passages(several, what, "id")
