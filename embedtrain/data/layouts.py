"""What a row's values mean: FlagEmbedding's keys, or sentence-transformers' columns by order -> texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from embedtrain.config.schema import DataFormat, TrainSource
from embedtrain.data.files import BadRow, shortened, told
from embedtrain.data.sources import Kind
from embedtrain.errors import ConfigError, DataError

# sentence-transformers' names for a column that is no text but what the texts' pair is worth.
SCORE_COLUMNS = ("score", "scores", "label", "labels")


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of one row, checked: none is empty, there is a positive, no negative is a positive or repeated."""

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]
    num_dropped: int  # negatives left out because they equal a positive or another negative


class Layout(Protocol):
    """A way to read rows. `ignored` collects the names of values that rows have and that are not used."""

    ignored: dict[str, None]  # a set that keeps its order

    def texts(self, row: dict[str, Any]) -> Texts:
        """The row's texts.

        Raises:
            BadRow: the row cannot be used.
        """
        ...

    def told(self) -> str:
        """What the rows were recognised as, for the user."""
        ...


def choose_layout(source: TrainSource, kind: Kind, row: dict[str, Any]) -> Layout:
    """The layout that the source asks for, or else the one that its first row shows.

    Raises:
        ConfigError: `columns` is given for a format that has none.
        DataError: the row's columns cannot be query, positive and negatives.
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
        return FlagEmbedding()
    return Columns(_chosen_columns(source, list(row)))


@dataclass
class FlagEmbedding:
    """Rows `{"query": str, "pos": [str, ...], "neg": [str, ...]}`, `neg` optional, other keys ignored.

    https://github.com/FlagOpen/FlagEmbedding/tree/master/examples/finetune/embedder
    """

    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any]) -> Texts:
        """See Layout."""
        for key in ("query", "pos"):
            if key not in row:
                raise BadRow(f'no "{key}" in this row, which has: {", ".join(row) or "nothing"}')
        if len(row) > 2:
            self.ignored.update((key, None) for key in row if key not in ("query", "pos", "neg"))
        query = _text(row["query"], '"query"')
        positives = _text_list(row["pos"], '"pos"')
        if not positives:
            raise BadRow('"pos" is empty: a row needs at least one positive')
        negatives = row.get("neg")
        return _checked(query, positives, [] if negatives is None else _text_list(negatives, '"neg"'))

    def told(self) -> str:
        """See Layout."""
        return "FlagEmbedding rows"


@dataclass
class Columns:
    """Columns by their order: query, positive, then negatives. A value may be a text or a list of texts."""

    names: list[str]
    ignored: dict[str, None] = field(default_factory=dict)

    def texts(self, row: dict[str, Any]) -> Texts:
        """See Layout."""
        if len(row) > len(self.names):
            self.ignored.update((key, None) for key in row if key not in self.names)
        for name in self.names[:2]:
            if name not in row:
                raise BadRow(f'no "{name}" in this row, which has: {", ".join(row) or "nothing"}')
        first, second, *others = self.names
        query = _text(row[first], f'column "{first}"')
        positives = _texts(row[second], f'column "{second}"')
        if not positives:
            raise BadRow(f'column "{second}" is empty: a row needs at least one positive')
        negatives: list[str] = []
        for name in others:
            value = row.get(name)
            if value is not None:  # how a table says that this row has fewer negatives than others
                negatives += _texts(value, f'column "{name}"')
        return _checked(query, positives, negatives)

    def told(self) -> str:
        """See Layout."""
        first, second, *others = self.names
        parts = [f"columns {first} = query", f"{second} = positive"]
        return ", ".join(parts + ([f"{' + '.join(others)} = negatives"] if others else []))


def _chosen_columns(source: TrainSource, present: list[str]) -> list[str]:
    if source.columns is not None:
        if len(source.columns) < 2:
            raise ConfigError(f"{source.path}: columns={source.columns}: name at least two, query and positive")
        missing = [name for name in source.columns if name not in present]
        if missing:
            raise DataError(f"{source.path}: no column {missing[0]!r}; there are: {', '.join(present)}")
        return source.columns
    texts = [name for name in present if name.lower() not in SCORE_COLUMNS]
    scores = [name for name in present if name not in texts]
    if scores:
        raise DataError(
            f"{source.path}: column {scores[0]!r} makes these scored pairs, which this loss (InfoNCE) has no use for: "
            f"name the columns to train on, such as columns=[{','.join(texts[:2])}], or take the source out"
        )
    if len(texts) < 2:
        raise DataError(
            f"{source.path}: rows need a query and a positive, as two columns or as FlagEmbedding's "
            f'"query" and "pos"; there is: {", ".join(present) or "nothing"}'
        )
    return texts


def _checked(query: str, positives: Sequence[str], negatives: Sequence[str]) -> Texts:
    kept = [text for text in dict.fromkeys(negatives) if text not in positives]
    return Texts(query, tuple(positives), tuple(kept), len(negatives) - len(kept))


def _texts(value: object, what: str) -> list[str]:
    return _text_list(value, what) if isinstance(value, list) else [_text(value, what)]


def _text_list(value: object, what: str) -> list[str]:
    if not isinstance(value, list):
        hint = ": put it in brackets" if isinstance(value, str) else ""
        raise BadRow(f"{what} must be a list of texts, not {told(value)}{hint}")
    return [_text(element, f"element {i} of {what}") for i, element in enumerate(value, 1)]


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{what} must be a text, not {told(value)}")
    if not value.strip():
        raise BadRow(f"{what} is an empty text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            around = value[max(0, error.start - 10) : error.start + 10]
            raise BadRow(f"{what} holds half a character (a lone surrogate): {shortened(around)}") from None
    return value
