"""What every layout offers: from a row's values to texts, and a phrase for the user."""

from typing import Any, Protocol

from embedtrain.config.losses import LOSSES, CombinedConfig, SentenceTransformersConfig
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement, row_requirements
from embedtrain.data.sources.problems import BadRow
from embedtrain.data.types import Texts

TEXTS_ONLY = RowRequirements()  # a query and a positive: what most losses need


class DocumentLookup(Protocol):
    """Texts by the ids that rows name them by."""

    def text(self, name: str) -> str | None:
        """The document's text, its title first; None where there is no such document."""
        ...


class RowLayout(Protocol):
    """A way to read rows. What rows showed is collected, in the order of its finding, for the report.

    Attributes:
        found: of what rows may hold, that which some did; `told` names it.
        ignored: the names of values that rows have and that are not used.
    """

    found: dict[str, None]  # sets that keep their order
    ignored: dict[str, None]

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Texts:
        """The row's texts, and of what lies beside them that which the loss needs.

        Args:
            row: its values by column or key.
            documents: those that rows name by id, where they do.

        Raises:
            BadRow: the row cannot be used.
        """
        ...

    def told(self) -> str:
        """What the rows were recognised as, for the user."""
        ...


def beside(needs: RowRequirements) -> str:
    """What the loss needs beside texts, in words."""
    if needs.label:
        return "the class of every row"
    if needs.vectors:
        return "a teacher's vectors of every text"
    return (
        "a teacher's score of every document"
        if needs.scores == ScoreRequirement.teacher
        else "a score of every document"
    )


def losses_of_scores() -> str:
    """The losses that use scores of pairs, as they are chosen by `loss`."""
    kinds = [kind for kind in LOSSES.values() if kind not in (CombinedConfig, SentenceTransformersConfig)]
    needs = [row_requirements(kind()) for kind in kinds]
    return ", ".join(need.loss for need in needs if need.scores == ScoreRequirement.pairs)


def require(row: dict[str, Any], *keys: str) -> None:
    """Refuse a row that lacks one of these keys."""
    for key in keys:
        if key not in row:
            raise BadRow(f'no "{key}" in this row, which has: {", ".join(row) or "nothing"}')


def with_found(told: str, found: dict[str, None]) -> str:
    """`told`, and what was found in rows."""
    *first, last = found or [""]
    return f"{told} with {', '.join(first)}{' and ' if first else ''}{last}" if found else told
