"""Checks of training rows, of one row and of all sources together, and what is counted and reported of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from embedtrain.config.recipe import TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.images.item import chunks_of
from embedtrain.data.rows import Example
from embedtrain.data.sources.column_layouts import BY_ORDER
from embedtrain.data.sources.parts import SourcePart
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import format_count

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NegativeCounts:
    """How many hard negatives the rows of one source have."""

    source: str  # its name in messages
    fewest: int
    most: int
    one_text: bool  # its rows are one text each, without documents


def check_sources(sources: Sequence[TrainSource], needs: Sequence[RowRequirements]) -> None:
    """Reject requirements that no row meets, and `negatives` of a source that do not fit the needs of its loss.

    Raises:
        ConfigError: the loss, or the source and its option.
    """
    for requirements in dict.fromkeys(needs):
        _check_needs(requirements)
    for source, requirements in zip(sources, needs, strict=True):
        if source.negatives is not None and source.negatives < 0:
            raise ConfigError(f"{source.path}: negatives={source.negatives} must be a number from 0, or null for all")
        if requirements.negatives and source.negatives == 0:
            raise ConfigError(
                f"{source.path}: negatives=0, and loss={requirements.loss} needs a hard negative in every row: "
                "write 1 or more, or null for all"
            )


def _check_needs(needs: RowRequirements) -> None:
    exclusive = {
        "a class": needs.label,
        "scores of documents": needs.scores != ScoreRequirement.none,
        "a teacher's vectors": needs.vectors,
        "documents": needs.label and needs.documents and needs.scores == ScoreRequirement.none,
    }
    required = [name for name, is_required in exclusive.items() if is_required]
    if len(required) > 1:
        raise ConfigError(
            f"loss={needs.loss} asks of every row {' and '.join(required)}, and a row cannot hold all of them: "
            "leave one of these losses out"
        )


class RowCheck:
    """Checks the rows of one piece of a source, in order, for what the loss needs."""

    def __init__(self, needs: RowRequirements) -> None:
        self._needs = needs
        self._width: int | None = None

    def __call__(self, texts: Example) -> Example:
        """The row; if the loss needs scores and it has none, with 1 for a positive and 0 for a negative.

        With `positive_above`, its positives are the documents with higher scores.

        Raises:
            BadRow: it lacks a positive, a negative, or the number of the chunk that answers the query; a score is out
                of range, all scores are equal and the loss ranks documents, or a vector has another dimension than
                those before.
        """
        if self._needs.scores == ScoreRequirement.pairs and not texts.positives.scores:
            positives = replace(texts.positives, scores=(1.0,) * len(texts.positives))
            negatives = replace(texts.negatives, scores=(0.0,) * len(texts.negatives))
            texts = replace(texts, positives=positives, negatives=negatives)
        if self._needs.positive_above is not None:
            texts = _split_by_score(texts, self._needs.positive_above, self._needs.loss)
        if self._needs.negatives and not texts.negatives:
            dropped = " other than its positives" if texts.negatives.num_dropped else ""
            hint = f"; {self._needs.without_negatives}" * bool(self._needs.without_negatives)
            raise BadRow(
                f"loss={self._needs.loss} needs a hard negative in every row, and this one has none{dropped}{hint}"
            )
        for document in texts.positives.texts:
            chunks, answers = chunks_of(document)
            if len(chunks) > 1 and not answers:
                raise BadRow(
                    f"a positive has {len(chunks)} chunks, and the row does not say which one answers the query: write "
                    '{"chunks": [...], "chunk": 2} with its number, from 0'
                )
        all_scores = (*texts.positives.scores, *texts.negatives.scores)
        for score in all_scores:
            if score not in self._needs.range:
                hint = "" if self._needs.range.integers else "; `score_scale` of a source divides its scores"
                raise BadRow(f"loss={self._needs.loss} needs scores that are {self._needs.range}, not {score:g}{hint}")
        scores = {*all_scores, *[0.0] * (self._needs.batch_negatives > 0)}
        if self._needs.ranked and len(scores) < 2:
            documents = format_count(len(texts.positives) + len(texts.negatives), "document")
            raise BadRow(
                f"loss={self._needs.loss} ranks documents of different scores, and this row has {documents} with "
                f"the score {next(iter(scores)):g}"
            )
        self._check_width(texts)
        return texts

    def _check_width(self, texts: Example) -> None:
        width = self._width
        for vector in texts.vectors:
            width = width or len(vector)
            if len(vector) != width:
                raise BadRow(f"a vector of {len(vector)} numbers, where those before have {width}")
        self._width = width  # only now, so that a skipped row does not set it


def _split_by_score(texts: Example, threshold: float, loss: str) -> Example:
    """The row with the documents of a score above the threshold as its positives and all others as its negatives."""
    documents = texts.positives.joined(texts.negatives)
    if max(documents.scores) <= threshold:
        raise BadRow(
            f"loss={loss} needs a document with a score above positive_above={threshold:g}, and the highest score of "
            f"this row is {max(documents.scores):g}"
        )
    above, rest = (
        [i for i, score in enumerate(documents.scores) if (score > threshold) == is_above] for is_above in (True, False)
    )
    negatives = replace(documents.take(rest), num_dropped=texts.negatives.num_dropped)
    return replace(texts, positives=documents.take(above), negatives=negatives)


def check_equal_counts(needs: RowRequirements, counts: Sequence[NegativeCounts]) -> None:
    """Require the same number of documents in every row, if the loss does; `counts` are of what a step uses.

    Raises:
        ConfigError: the rows of one source, or of two, differ; the message says how to make them equal.
    """
    if not needs.same_num_documents:
        return
    same = f"and loss={needs.loss} needs the same number in every row"
    for count in counts:
        if count.fewest < count.most:
            raise ConfigError(
                f"data.train: {count.source} has rows with {count.fewest} to {count.most} negatives, {same}: "
                f"write {{path: ..., negatives: {count.fewest}}} for it"
            )
    for first, other in pairwise(counts):
        if first.one_text != other.one_text:
            texts, pairs = (first, other) if first.one_text else (other, first)
            raise ConfigError(
                f"data.train: {texts.source} has rows of one text and {pairs.source} rows of query and document, "
                f"{same}: remove one of them"
            )
        if first.most != other.most:
            raise ConfigError(
                f"data.train: {first.source} has rows with {first.most} negatives and {other.source} with "
                f"{other.most}, {same}: write {{path: ..., negatives: {min(first.most, other.most)}}} for both"
            )


MAX_PROBLEMS_SHOWN = 3  # different ones, and rows of each
_OTHER_PROBLEMS = "other problems"


@dataclass(slots=True)
class SkippedRows:
    """The rows of a source that have the same problem."""

    problem: str
    num_rows: int = 0
    first: list[tuple[int, int]] = field(default_factory=list)  # part and line (0: the whole part) of a few

    def add(self, num_rows: int, rows: Iterable[tuple[int, int]]) -> None:
        """Count rows that come after those before."""
        self.num_rows += num_rows
        self.first = [*self.first, *rows][:MAX_PROBLEMS_SHOWN]

    def describe(self, parts: Sequence[SourcePart]) -> str:
        """`path:2, 5, 9 and 34 more: problem`."""
        written = []
        for index, row in enumerate(self.first):
            same_part = index > 0 and row[0] == self.first[index - 1][0] and row[1] > 0
            written.append(str(row[1]) if same_part else _location(parts, *row))
        more = self.num_rows - len(self.first)
        return f"{', '.join(written)}{f' and {more:,} more' if more else ''}: {self.problem}"


def _location(parts: Sequence[SourcePart], part: int, line: int) -> str:
    return parts[part].location(line) if line else parts[part].name


@dataclass(kw_only=True)
class RowCounts:
    """What is counted of a piece of a source, and of a whole source."""

    num_rows: int = 0
    num_skipped: int = 0  # rows and empty files, with on_error=skip
    num_left_out: int = 0  # rows for which `where` of the source does not hold
    num_dropped: int = 0  # negatives equal to a positive of their row, or repeated in it
    num_unscored: int = 0  # rows without scores, for a loss that uses them
    fewest_negatives: int = 0  # of the rows; how many a step uses at most is `Example.max_negatives`
    most_negatives: int = 0
    one_text: bool = False  # rows are one text each, without documents
    ignored: list[str] = field(default_factory=list)  # columns that are not used
    num_animated: int = 0  # pictures of several frames, of which the first is used


@dataclass(kw_only=True)
class SourceReport:
    """Statistics of one source for the user."""

    name: str
    rows: RowCounts
    layout: str = ""
    files: list[str] = field(default_factory=list)
    left_out: Sequence[str] = ()  # files of other splits
    negatives_used: int | None = None
    problems: list[str] = field(default_factory=list)  # the first few of those skipped
    skipped: list[str] = field(default_factory=list)  # the same, those with the same problem together
    cached: bool = False  # nothing had to be read
    num_pictures: int = 0  # different ones, with those of the corpus

    def __str__(self) -> str:
        """One line for the user."""
        parts = [f"{self.name}: {self.layout}, {self.rows.num_rows:,} rows from {self._files()}", self._negatives()]
        if self.left_out:
            parts.insert(1, f"left out: {_names(self.left_out)} (another split by name)")
        parts += [f"{self.rows.num_left_out:,} other rows left out by `where`"] if self.rows.num_left_out else []
        if self.rows.num_dropped:
            parts.append(f"{self.rows.num_dropped:,} negatives left out that equal a positive or repeat another")
        if self.rows.num_unscored:
            which = "rows" if self.rows.num_unscored == self.rows.num_rows else f"{self.rows.num_unscored:,} rows"
            parts.append(f"{which} without scores: positives count 1, negatives 0")
        if self.rows.ignored:
            more = ", ..." if len(self.rows.ignored) > 8 else ""
            parts.append(f"not used: {', '.join(self.rows.ignored[:8])}{more}")
        if self.num_pictures:
            parts.append(format_count(self.num_pictures, "picture"))
        if self.rows.num_animated:
            parts.append(f"the first frame of {format_count(self.rows.num_animated, 'animated picture')} is used")
        if self.rows.num_skipped:
            parts.append(f"{self.rows.num_skipped:,} bad rows skipped ({'; '.join(self.skipped)})")
        if self.cached:
            parts.append("cached")
        return "; ".join(parts)

    def warnings(self) -> list[str]:
        """What may be a mistake: the order of columns whose names do not say which is the query."""
        if f" {BY_ORDER};" not in self.layout:
            return []
        return [f"{self.name}: no name says which column is the query, so the first is: {self.layout}"]

    def negative_counts(self) -> NegativeCounts:
        """The numbers of negatives that a step uses."""
        used = self.rows.most_negatives if self.negatives_used is None else self.negatives_used
        return NegativeCounts(
            self.name, min(self.rows.fewest_negatives, used), min(self.rows.most_negatives, used), self.rows.one_text
        )

    def _files(self) -> str:
        # By name, since a folder may hold files that are not intended, such as a test split.
        names = _names(self.files)
        return f"{len(self.files)} files ({names})" if self.files[1:] else names

    def _negatives(self) -> str:
        most, fewest, used = self.rows.most_negatives, self.rows.fewest_negatives, self.negatives_used
        if self.rows.one_text:
            return "one text a row"
        if most == 0:
            return "no negatives"
        if used is not None and used < most:
            drawn = f"{used} drawn each epoch" if used else "none used (negatives=0)"
            return f"rows carry up to {most} negatives, {drawn}"
        return f"{most} negatives a row" if fewest == most else f"{fewest} to {most} negatives a row"


def _names(files: Sequence[str]) -> str:
    return ", ".join(Path(file).name for file in files[:4]) + ", ..." * (len(files) > 4)


@dataclass(kw_only=True)
class RowStatistics:
    """Statistics of one piece of a source, or of all; parts are numbers, so that files may move."""

    rows: RowCounts = field(default_factory=RowCounts)
    features: list[str] = field(default_factory=list)  # of the layout
    skipped: list[SkippedRows] = field(default_factory=list)  # in the order of their first rows
    width: tuple[int, int, int] | None = None  # dimension of a teacher's vectors; part and line of the first

    def add(self, texts: Example, *, scored: bool) -> None:
        """Count one row; `scored`: it had no scores and RowCheck added them."""
        rows, count = self.rows, len(texts.negatives.texts)
        rows.fewest_negatives = min(rows.fewest_negatives, count) if rows.num_rows else count
        rows.most_negatives = max(rows.most_negatives, count)
        rows.num_dropped += texts.negatives.num_dropped
        rows.num_unscored += scored
        rows.num_rows += 1
        rows.one_text = not texts.positives.texts

    def skip(self, part: int, line: int, problem: str) -> None:
        """Count one row that cannot be used, or an empty part if the line is 0."""
        self.rows.num_skipped += 1
        self._group(problem).add(1, [(part, line)])

    def _group(self, problem: str) -> SkippedRows:
        """The rows with this problem; the last group has those of further problems."""
        for group in self.skipped:
            if group.problem in (problem, _OTHER_PROBLEMS):
                return group
        full = len(self.skipped) >= MAX_PROBLEMS_SHOWN
        self.skipped.append(SkippedRows(_OTHER_PROBLEMS if full else problem))
        return self.skipped[-1]

    def after(self, lines: int) -> "RowStatistics":
        """The same with line numbers increased by `lines`."""

        def moved(first: list[tuple[int, int]]) -> list[tuple[int, int]]:
            return [(part, lines + line if line else 0) for part, line in first]

        skipped = [replace(group, first=moved(group.first)) for group in self.skipped]
        width = self.width and (self.width[0], self.width[1], lines + self.width[2])
        return replace(self, skipped=skipped, width=width)

    def join(self, after: "RowStatistics") -> None:
        """Add the statistics of the next piece."""
        if after.rows.num_rows:
            fewest = after.rows.fewest_negatives
            self.rows.fewest_negatives = min(self.rows.fewest_negatives, fewest) if self.rows.num_rows else fewest
            self.rows.most_negatives = max(self.rows.most_negatives, after.rows.most_negatives)
            self.rows.one_text = after.rows.one_text
        for name in ("num_rows", "num_skipped", "num_left_out", "num_dropped", "num_unscored", "num_animated"):
            setattr(self.rows, name, getattr(self.rows, name) + getattr(after.rows, name))
        self.features = list(dict.fromkeys([*self.features, *after.features]))
        self.rows.ignored = list(dict.fromkeys([*self.rows.ignored, *after.rows.ignored]))
        for group in after.skipped:
            self._group(group.problem).add(group.num_rows, group.first)
        self.width = self.width or after.width

    @classmethod
    def of(cls, values: dict[str, Any]) -> "RowStatistics":
        """From the result of `dataclasses.asdict` in JSON."""
        skipped = [SkippedRows(**{**group, "first": list(map(tuple, group["first"]))}) for group in values["skipped"]]
        width = None if values["width"] is None else tuple(values["width"])
        rows = RowCounts(**values["rows"])
        return cls(**{**values, "rows": rows, "skipped": skipped, "width": width})

    def report(
        self, name: str, layout: str, parts: Sequence[SourcePart], negatives_used: int | None, *, cached: bool
    ) -> SourceReport:
        """The report for the user, with the current paths of the files."""
        return SourceReport(
            name=name,
            layout=layout,
            files=[part.name for part in parts],
            negatives_used=negatives_used,
            problems=[
                f"{_location(parts, *row)}: {problem}"
                for row, problem in sorted((row, group.problem) for group in self.skipped for row in group.first)
            ][:MAX_PROBLEMS_SHOWN],
            skipped=[group.describe(parts) for group in self.skipped],
            cached=cached,
            rows=self.rows,
        )
