"""Columns by their order, as sentence-transformers reads them: query, positive, negatives, and perhaps a score."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.recipe import TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.sources import values
from embedtrain.data.sources.kinds import PartKind
from embedtrain.data.sources.layouts.layout import TEXTS_ONLY, DocumentLookup, beside, losses_of_scores
from embedtrain.data.sources.problems import BadRow
from embedtrain.data.types import Texts
from embedtrain.errors import ConfigError, DataError

# sentence-transformers' names for a column that is no text but what the texts' pair is worth.
SCORE_COLUMNS = ("score", "scores", "label", "labels")


@dataclass
class Columns:
    """Columns by their order: query, positive, then negatives. A value may be a text or a list of texts.

    One more, `score`, holds what the loss needs beside texts: scores, a class, or a teacher's vectors; or, for
    a loss without such needs, which documents of a list are positives, as `mine_hard_negatives` of
    sentence-transformers writes them (labeled-list).
    """

    names: list[str]  # of the columns of texts
    score: str | None = None
    needs: RowRequirements = TEXTS_ONLY
    cells: bool = False  # of CSV or TSV, where numbers are texts as well
    found: dict[str, None] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any], documents: DocumentLookup | None = None) -> Texts:
        """See Layout."""
        required = self.names[:2] if self.score is None else [*self.names[:2], self.score]
        if len(row) > len(self.names) + (self.score is not None):
            self.ignored.update((key, None) for key in row if key not in self.names and key != self.score)
        for name in required:
            if name not in row:
                raise BadRow(f'no "{name}" in this row, which has: {", ".join(row) or "nothing"}')
        query = values.text(row[self.names[0]], f'column "{self.names[0]}"')
        positives: list[str] = []
        for name in self.names[1:2]:
            positives = values.texts(row[name], f'column "{name}"')
            if not positives:
                raise BadRow(f'column "{name}" is empty: a row needs at least one positive')
        negatives: list[str] = []
        for name in self.names[2:]:
            value = row.get(name)
            if value is not None:  # how a table says that this row has fewer negatives than others
                negatives += values.texts(value, f'column "{name}"')
        return self._with_score(row, query, positives, negatives)

    def _with_score(self, row: dict[str, Any], query: str, positives: list[str], negatives: list[str]) -> Texts:
        if self.score is None:
            return values.checked(query, positives, negatives)
        what, value = f'column "{self.score}"', row[self.score]
        if self.cells:
            value = values.cell(value)
        if self.needs.scores == ScoreRequirement.none and not self.needs.label and not self.needs.vectors:
            marks = values.marks(value, what, len(positives))
            chosen = [text for text, mark in zip(positives, marks, strict=True) if mark]
            if not chosen:
                raise BadRow(f"{what} marks no document as a positive (1): a row needs at least one")
            others = [text for text, mark in zip(positives, marks, strict=True) if not mark]
            return values.checked(query, chosen, others + negatives)
        if self.needs.label:
            return values.checked(query, positives, negatives, label=values.class_number(value, what))
        num_documents = len(positives) + len(negatives)
        if self.needs.vectors:
            vectors = values.vectors(value, what, 1 + num_documents)
            return values.checked(query, positives, negatives, vectors=vectors)
        scores = values.scores(value, what, len(positives), len(negatives), len(self.names))
        return values.checked(query, positives, negatives, scores=scores)

    def told(self) -> str:
        """See Layout."""
        first, *others = self.names
        parts = [f"columns {first} = query" if others else f"column {first} = query"]
        if others:
            parts.append(f"{others[0]} = positive")
        if others[1:]:
            parts.append(f"{' + '.join(others[1:])} = negatives")
        if self.score is not None:
            wants_scores = self.needs.scores != ScoreRequirement.none
            meaning = "1 for positives, 0 for negatives" if not wants_scores else "score"
            meaning = "class" if self.needs.label else "vectors" if self.needs.vectors else meaning
            parts.append(f"{self.score} = {meaning}")
        return ", ".join(parts)


def choose_columns(source: TrainSource, kind: PartKind, row: dict[str, Any], needs: RowRequirements) -> Columns:
    """The columns that the source names, or else those of its first row.

    Raises:
        ConfigError: `columns` names too few.
        DataError: the row's columns cannot be what the loss needs.
    """
    texts, score = _chosen_columns(source, row, needs)
    return Columns(texts, score, needs, cells=kind in (PartKind.csv, PartKind.tsv))


def _chosen_columns(source: TrainSource, row: dict[str, Any], needs: RowRequirements) -> tuple[list[str], str | None]:
    """The columns of texts, and the one of scores, classes or vectors."""
    present = list(row)
    wants = needs.scores != ScoreRequirement.none or needs.label or needs.vectors
    named = present if source.columns is None else source.columns
    # Where nothing but texts is wanted, a column is what the user says it is, whatever its name.
    scores = [n for n in named if n.lower() in SCORE_COLUMNS] if wants or source.columns is None else []
    texts = [n for n in named if n not in scores]
    _check_number_of_texts(source, texts, needs)
    missing = [name for name in named if name not in present]
    if missing:
        raise DataError(f"{source.path}: no column {missing[0]!r}; there are: {', '.join(present)}")
    if len(scores) == 1 and not wants and _marks_documents(row, texts, scores[0]):
        return texts, scores[0]
    if scores and not wants:
        raise DataError(
            f"{source.path}: column {scores[0]!r} makes these scored pairs, which loss={needs.loss} has no use for: "
            f"name the columns to train on, such as columns=[{','.join(texts[:2])}], or take the source out; "
            f"losses that use scores: {losses_of_scores()}"
        )
    if len(scores) > 1:
        raise DataError(
            f"{source.path}: columns {scores[0]!r} and {scores[1]!r} may both be what loss={needs.loss} needs beside "
            f"texts: name the columns to train on, such as columns=[{','.join([*texts, scores[0]])}]"
        )
    _check_texts(source, texts, present, needs)
    if wants and needs.scores != ScoreRequirement.pairs and not scores:
        raise DataError(
            f"{source.path}: loss={needs.loss} needs {beside(needs)}, and no column is named score, scores, label "
            f"or labels; there {'is' if source.columns is None else 'is, in columns'}: {', '.join(named)}"
        )
    return texts, scores[0] if scores else None


def _marks_documents(row: dict[str, Any], texts: list[str], score: str) -> bool:
    """Whether a column says 1 or 0 of each document in a list."""
    documents, marks = row.get(texts[1]) if len(texts) == 2 else None, row[score]
    return isinstance(documents, list) and isinstance(marks, list) and all(mark in (0, 1) for mark in marks)


def _check_number_of_texts(source: TrainSource, texts: list[str], needs: RowRequirements) -> None:
    if source.columns is None or len(texts) >= _fewest_texts(needs):
        return
    wanted = "at least two, query and positive" if _fewest_texts(needs) == 2 else "at least one of texts"
    raise ConfigError(f"{source.path}: columns={source.columns}: name {wanted}")


def _check_texts(source: TrainSource, texts: list[str], present: list[str], needs: RowRequirements) -> None:
    if needs.label and len(texts) > 1:
        raise DataError(
            f"{source.path}: loss={needs.loss} takes one text and its class, and there are the columns of texts "
            f"{', '.join(texts)}: name one of them and that of the class, such as columns=[{texts[0]},label]"
        )
    if len(texts) < _fewest_texts(needs):
        wanted = 'a query and a positive, as two columns or as FlagEmbedding\'s "query" and "pos"'
        wanted = wanted if _fewest_texts(needs) == 2 else "a text"
        raise DataError(f"{source.path}: rows need {wanted}; there is: {', '.join(present) or 'nothing'}")


def _fewest_texts(needs: RowRequirements) -> int:
    return 2 if needs.documents or needs.scores != ScoreRequirement.none else 1
