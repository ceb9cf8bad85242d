"""Tevatron's rows: passages with docid, title and text in the row itself, or ids of documents of a corpus."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.sources import values
from embedtrain.data.sources.layouts.layout import TEXTS_ONLY, DocumentLookup, require, with_found
from embedtrain.data.sources.layouts.named import ids, looked_up, passages, refuse_images
from embedtrain.data.sources.problems import BadRow
from embedtrain.data.types import Texts


@dataclass
class Passages:
    """Rows `{"query", "positive_passages": [{"docid", "title", "text"}, ...], "negative_passages": [...]}`.

    A document is `title + " " + text`, its docid is its id. https://github.com/texttron/tevatron
    """

    needs: RowRequirements = TEXTS_ONLY
    found: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Texts:
        """See Layout."""
        require(row, "query", "positive_passages")
        query = values.text(row["query"], '"query"')
        positives, positive_ids = passages(row["positive_passages"], '"positive_passages"', "docid")
        if not positives:
            raise BadRow('"positive_passages" is empty: a row needs at least one positive')
        negatives, negative_ids = passages(row.get("negative_passages"), '"negative_passages"', "docid")
        read = ("query", "positive_passages", "negative_passages")
        self.ignored.update((key, None) for key in row if key not in read)
        if positive_ids or negative_ids:
            self.found["ids"] = None
        return values.checked(query, positives, negatives, positive_ids=positive_ids, negative_ids=negative_ids)

    def told(self) -> str:
        """See Layout."""
        return with_found("Tevatron passages", self.found)


@dataclass
class DocumentIds:
    """Rows `{"query_text", "positive_document_ids": [...], "negative_document_ids": [...]}`, and a corpus.

    The query's key may be `query` too. https://github.com/texttron/tevatron
    """

    needs: RowRequirements = TEXTS_ONLY
    found: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Texts:
        """See Layout."""
        refuse_images(row, "this row")
        key = "query" if "query_text" not in row and "query" in row else "query_text"
        require(row, key, "positive_document_ids")
        query = values.text(row[key], f'"{key}"')
        positive_ids = ids(row["positive_document_ids"], '"positive_document_ids"')
        negative_ids = ids(row.get("negative_document_ids"), '"negative_document_ids"')
        if not positive_ids:
            raise BadRow('"positive_document_ids" is empty: a row needs at least one positive')
        read = (key, "positive_document_ids", "negative_document_ids")
        self.ignored.update((name, None) for name, value in row.items() if name not in read and value is not None)
        return values.checked(
            query,
            looked_up(positive_ids, '"positive_document_ids"', documents),
            looked_up(negative_ids, '"negative_document_ids"', documents),
            positive_ids=positive_ids,
            negative_ids=negative_ids,
        )

    def told(self) -> str:
        """See Layout."""
        return "Tevatron rows with ids of documents of a corpus"
