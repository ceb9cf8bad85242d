"""What a row's values mean: FlagEmbedding's keys, or sentence-transformers' columns by order -> texts."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from embedtrain.config.needs import Needs, Scores
from embedtrain.config.schema import DataFormat, TrainSource
from embedtrain.data import values
from embedtrain.data.files import BadRow
from embedtrain.data.sources import Kind
from embedtrain.data.types import Texts
from embedtrain.errors import ConfigError, DataError

# sentence-transformers' names for a column that is no text but what the texts' pair is worth.
SCORE_COLUMNS = ("score", "scores", "label", "labels")
TEXTS_ALONE = Needs()  # a query and a positive: what most losses need


class Layout(Protocol):
    """A way to read rows. `ignored` collects the names of values that rows have and that are not used."""

    ignored: dict[str, None]  # a set that keeps its order

    def texts(self, row: dict[str, Any]) -> Texts:
        """The row's texts, and of what lies beside them that which the loss needs.

        Raises:
            BadRow: the row cannot be used.
        """
        ...

    def told(self) -> str:
        """What the rows were recognised as, for the user."""
        ...


def choose_layout(source: TrainSource, kind: Kind, row: dict[str, Any], needs: Needs = TEXTS_ALONE) -> Layout:
    """The layout that the source asks for, or else the one that its first row shows.

    Args:
        source: an element of `data.train`.
        kind: how the row is stored.
        row: the source's first row.
        needs: what the loss asks of every row.

    Raises:
        ConfigError: `columns` is given for a format that has none, or names too few.
        DataError: the row's columns cannot be what the loss needs.
    """
    wanted = source.format
    if wanted == DataFormat.flagembedding and source.columns is not None:
        raise ConfigError(f"{source.path}: columns has no use with format=flagembedding: leave one of them out")
    if wanted == DataFormat.auto:
        # A row with `query` and `neg` has lost its `pos`; taken as columns its negatives would be positives.
        keys = row.keys()
        flag = "query" in keys and ("pos" in keys or "neg" in keys) and kind not in (Kind.csv, Kind.tsv)
        wanted = DataFormat.flagembedding if flag and source.columns is None else DataFormat.columns
    if wanted == DataFormat.flagembedding:
        if needs.label or needs.vectors:
            raise DataError(
                f"{source.path}: loss={needs.loss} needs {_beside(needs)}, which FlagEmbedding rows do not hold: "
                "give it as a column named label, beside columns of texts"
            )
        return FlagEmbedding(needs)
    texts, score = _chosen_columns(source, list(row), needs)
    return Columns(texts, score, needs, cells=kind in (Kind.csv, Kind.tsv))


@dataclass
class FlagEmbedding:
    """Rows `{"query": str, "pos": [str, ...], "neg": [str, ...]}`; `neg` is optional.

    Beside them `pos_scores` and `neg_scores` are read if the loss needs scores, `pos_id` and `neg_id`
    always; other keys are ignored. https://github.com/FlagOpen/FlagEmbedding/tree/master/examples/finetune/embedder
    """

    needs: Needs = TEXTS_ALONE
    ignored: dict[str, None] = field(default_factory=dict)
    _found: dict[str, None] = field(default_factory=dict)  # of scores and ids, in the order of their finding

    def texts(self, row: dict[str, Any]) -> Texts:
        """See Layout."""
        for key in ("query", "pos"):
            if key not in row:
                raise BadRow(f'no "{key}" in this row, which has: {", ".join(row) or "nothing"}')
        query = values.text(row["query"], '"query"')
        positives = values.text_list(row["pos"], '"pos"')
        if not positives:
            raise BadRow('"pos" is empty: a row needs at least one positive')
        negatives = row.get("neg")
        negatives = [] if negatives is None else values.text_list(negatives, '"neg"')
        if len(row) > 2 + ("neg" in row):
            return self._with_more(row, query, positives, negatives)
        return values.checked(query, positives, negatives, scores=self._scores(row, positives, negatives))

    def _with_more(self, row: dict[str, Any], query: str, positives: list[str], negatives: list[str]) -> Texts:
        read = {"query", "pos", "neg", "pos_id", "neg_id"}
        if self.needs.scores != Scores.none:
            read |= {"pos_scores", "neg_scores"}
        self.ignored.update((key, None) for key in row if key not in read)
        scores = self._scores(row, positives, negatives)
        ids: list[list[str]] = []
        for key, of, texts in (("pos_id", '"pos"', positives), ("neg_id", '"neg"', negatives)):
            given = row.get(key)
            ids.append([] if given is None else values.one_each(given, f'"{key}"', of, len(texts), values.identifier))
        if scores:
            self._found["scores"] = None
        if any(ids):
            self._found["ids"] = None
        return values.checked(query, positives, negatives, scores=scores, positive_ids=ids[0], negative_ids=ids[1])

    def _scores(self, row: dict[str, Any], positives: list[str], negatives: list[str]) -> list[float]:
        if self.needs.scores == Scores.none:
            return []
        of_positives, of_negatives = row.get("pos_scores"), row.get("neg_scores")
        if self.needs.scores == Scores.pairs and of_positives is None and of_negatives is None:
            return []
        for key, given, texts in (("pos_scores", of_positives, positives), ("neg_scores", of_negatives, negatives)):
            if given is None and texts:
                raise BadRow(f'loss={self.needs.loss} needs {_beside(self.needs)}, and this row has no "{key}"')
        return [
            *values.one_each(of_positives, '"pos_scores"', '"pos"', len(positives), values.number),
            *values.one_each(of_negatives or [], '"neg_scores"', '"neg"', len(negatives), values.number),
        ]

    def told(self) -> str:
        """See Layout."""
        return "FlagEmbedding rows" + (f" with {' and '.join(self._found)}" if self._found else "")


@dataclass
class Columns:
    """Columns by their order: query, positive, then negatives. A value may be a text or a list of texts.

    One more, `score`, holds what the loss needs beside texts: scores, a class, or a teacher's vectors.
    """

    names: list[str]  # of the columns of texts
    score: str | None = None
    needs: Needs = TEXTS_ALONE
    cells: bool = False  # of CSV or TSV, where numbers are texts as well
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any]) -> Texts:
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
            meaning = "class" if self.needs.label else "vectors" if self.needs.vectors else "score"
            parts.append(f"{self.score} = {meaning}")
        return ", ".join(parts)


def _chosen_columns(source: TrainSource, present: list[str], needs: Needs) -> tuple[list[str], str | None]:
    """The columns of texts, and the one of scores, classes or vectors."""
    wants = needs.scores != Scores.none or needs.label or needs.vectors
    named = present if source.columns is None else source.columns
    # Where nothing but texts is wanted, a column is what the user says it is, whatever its name.
    scores = [n for n in named if n.lower() in SCORE_COLUMNS] if wants or source.columns is None else []
    texts = [n for n in named if n not in scores]
    _check_number_of_texts(source, texts, needs)
    missing = [name for name in named if name not in present]
    if missing:
        raise DataError(f"{source.path}: no column {missing[0]!r}; there are: {', '.join(present)}")
    if scores and not wants:
        raise DataError(
            f"{source.path}: column {scores[0]!r} makes these scored pairs, which loss={needs.loss} has no use for: "
            f"name the columns to train on, such as columns=[{','.join(texts[:2])}], or take the source out"
        )
    if len(scores) > 1:
        raise DataError(
            f"{source.path}: columns {scores[0]!r} and {scores[1]!r} may both be what loss={needs.loss} needs beside "
            f"texts: name the columns to train on, such as columns=[{','.join([*texts, scores[0]])}]"
        )
    _check_texts(source, texts, present, needs)
    if wants and needs.scores != Scores.pairs and not scores:
        raise DataError(
            f"{source.path}: loss={needs.loss} needs {_beside(needs)}, and no column is named score, scores, label "
            f"or labels; there {'is' if source.columns is None else 'is, in columns'}: {', '.join(named)}"
        )
    return texts, scores[0] if scores else None


def _check_number_of_texts(source: TrainSource, texts: list[str], needs: Needs) -> None:
    if source.columns is None or len(texts) >= _fewest_texts(needs):
        return
    wanted = "at least two, query and positive" if _fewest_texts(needs) == 2 else "at least one of texts"
    raise ConfigError(f"{source.path}: columns={source.columns}: name {wanted}")


def _check_texts(source: TrainSource, texts: list[str], present: list[str], needs: Needs) -> None:
    if needs.label and len(texts) > 1:
        raise DataError(
            f"{source.path}: loss={needs.loss} takes one text and its class, and there are the columns of texts "
            f"{', '.join(texts)}: name one of them and that of the class, such as columns=[{texts[0]},label]"
        )
    if len(texts) < _fewest_texts(needs):
        wanted = 'a query and a positive, as two columns or as FlagEmbedding\'s "query" and "pos"'
        wanted = wanted if _fewest_texts(needs) == 2 else "a text"
        raise DataError(f"{source.path}: rows need {wanted}; there is: {', '.join(present) or 'nothing'}")


def _fewest_texts(needs: Needs) -> int:
    return 2 if needs.documents or needs.scores != Scores.none else 1


def _beside(needs: Needs) -> str:
    """What the loss needs beside texts, in words."""
    if needs.label:
        return "the class of every row"
    if needs.vectors:
        return "a teacher's vectors of every text"
    return "a teacher's score of every document" if needs.scores == Scores.teacher else "a score of every document"
