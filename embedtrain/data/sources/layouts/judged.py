"""BEIR's judged queries: rows that `embedtrain.data.formats.beir` puts together, and a corpus."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.sources import values
from embedtrain.data.sources.layouts.layout import TEXTS_ONLY, DocumentLookup
from embedtrain.data.sources.layouts.named import looked_up
from embedtrain.data.types import Texts


@dataclass
class Judged:
    """Rows of a query and ids of documents: judged above 0, and judged otherwise.

    Where the loss needs scores they are the judgements'.
    """

    needs: RowRequirements = TEXTS_ONLY
    found: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Texts:
        """See Layout."""
        query = values.text(row["query"], "the query")
        positive_ids, negative_ids = row["positive_ids"], row["negative_ids"]
        wants_scores = self.needs.scores != ScoreRequirement.none
        if negative_ids:
            self.found["others that are judged = hard negatives"] = None
        return values.checked(
            query,
            looked_up(positive_ids, "the judgement", documents),
            looked_up(negative_ids, "the judgement", documents),
            scores=[*row["positive_scores"], *row["negative_scores"]] if wants_scores else (),
            positive_ids=positive_ids,
            negative_ids=negative_ids,
        )

    def told(self) -> str:
        """See Layout."""
        return "BEIR's judged queries, documents above 0 = positives" + "".join(f", {what}" for what in self.found)
