"""Checks and statistics of training rows: of one row, of a piece, of a source, and of all sources together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from embedtrain.config.recipe import TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.sources.parts import Part
from embedtrain.data.sources.values import BadRow
from embedtrain.data.types import Texts
from embedtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NegativeCounts:
    """How many hard negatives the rows of one source have."""

    source: str  # its name in messages
    fewest: int
    most: int
    one_text: bool  # its rows are one text each, without documents


def check_sources(sources: Sequence[TrainSource], needs: Sequence[RowRequirements]) -> None:
    """Refuse what no row can be, and options of sources that leave out what the loss needs.

    Args:
        sources: `data.train`.
        needs: for each source, what its loss asks.

    Raises:
        ConfigError: both of what a row can hold only one, no negatives for a loss of negatives, or a number of
            negatives below 0.
    """
    for one in dict.fromkeys(needs):
        _check_needs(one)
    for source, one in zip(sources, needs, strict=True):
        if source.negatives is not None and source.negatives < 0:
            raise ConfigError(f"{source.path}: negatives={source.negatives} must be a number from 0, or null for all")
        if one.negatives and source.negatives == 0:
            raise ConfigError(
                f"{source.path}: negatives=0, and loss={one.loss} needs a hard negative in every row: "
                "write 1 or more, or null for all"
            )


def _check_needs(needs: RowRequirements) -> None:
    asked = {
        "a class": needs.label,
        "scores of documents": needs.scores != ScoreRequirement.none,
        "a teacher's vectors": needs.vectors,
        "documents": needs.label and needs.documents and needs.scores == ScoreRequirement.none,
    }
    wanted = [what for what, is_asked in asked.items() if is_asked]
    if len(wanted) > 1:
        raise ConfigError(
            f"loss={needs.loss} asks of every row {' and '.join(wanted)}, and a row cannot hold all of them: "
            "leave one of these losses out"
        )


class RowCheck:
    """Checks rows one after the other, those of one piece of a source.

    Args:
        needs: what the loss asks of them.
    """

    def __init__(self, needs: RowRequirements) -> None:
        self._needs = needs
        self._width: int | None = None

    def __call__(self, texts: Texts) -> Texts:
        """The row, with scores where the loss wants some and it has none: 1 for a positive, 0 for a negative.

        Raises:
            BadRow: it lacks a negative, a score is out of range, or a vector has another width than those before.
        """
        if self._needs.negatives and not texts.negatives:
            dropped = " other than its positives" if texts.num_dropped else ""
            raise BadRow(f"loss={self._needs.loss} needs a hard negative in every row, and this one has none{dropped}")
        for score in (*texts.positive_scores, *texts.negative_scores):
            if score not in self._needs.range:
                hint = "" if self._needs.range.integers else "; `score_scale` of a source divides its scores"
                raise BadRow(f"loss={self._needs.loss} needs scores that are {self._needs.range}, not {score:g}{hint}")
        self._check_width(texts)
        if self._needs.scores == ScoreRequirement.pairs and not texts.positive_scores:
            ones, zeros = (1.0,) * len(texts.positives), (0.0,) * len(texts.negatives)
            return replace(texts, positive_scores=ones, negative_scores=zeros)
        return texts

    def _check_width(self, texts: Texts) -> None:
        width = self._width
        for vector in texts.vectors:
            width = width or len(vector)
            if len(vector) != width:
                raise BadRow(f"a vector of {len(vector)} numbers, where those before have {width}")
        self._width = width  # only now: a bad row that is passed over decides nothing


def check_equal_counts(needs: RowRequirements, counts: Sequence[NegativeCounts]) -> None:
    """Refuse rows of different numbers of documents, where the loss needs as many in every row.

    Args:
        needs: what the loss asks.
        counts: for each source, what a step uses of its rows.

    Raises:
        ConfigError: the rows of one source, or of two, differ; the text says what would make them equal.
    """
    if not needs.same_num_documents:
        return
    same = f"and loss={needs.loss} needs the same number in every row"
    for one in counts:
        if one.fewest < one.most:
            raise ConfigError(
                f"data.train: {one.source} has rows with {one.fewest} to {one.most} negatives, {same}: "
                f"write {{path: ..., negatives: {one.fewest}}} for it"
            )
    for first, other in pairwise(counts):
        if first.one_text != other.one_text:
            one, more = (first, other) if first.one_text else (other, first)
            raise ConfigError(
                f"data.train: {one.source} has rows of one text and {more.source} rows of query and document, "
                f"{same}: take one of them out"
            )
        if first.most != other.most:
            raise ConfigError(
                f"data.train: {first.source} has rows with {first.most} negatives and {other.source} with "
                f"{other.most}, {same}: write {{path: ..., negatives: {min(first.most, other.most)}}} for both"
            )


MAX_PROBLEMS_SHOWN = 3


@dataclass
class SourceReport:
    """What was found in one source."""

    name: str
    layout: str = ""
    num_rows: int = 0
    files: list[str] = field(default_factory=list)
    num_skipped: int = 0  # rows and empty files that on_error=skip passed over
    num_dropped: int = 0  # negatives equal to a positive of their row, or repeated in it
    fewest_negatives: int = 0
    most_negatives: int = 0
    negatives_used: int | None = None
    one_text: bool = False  # rows are one text each, without documents
    num_unscored: int = 0  # rows without scores, for a loss that has use for them
    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # the first few of those skipped
    cached: bool = False  # nothing had to be read: all was there already

    def __str__(self) -> str:
        """One line for the user."""
        said = [f"{self.name}: {self.layout}, {self.num_rows:,} rows from {self._files()}", self._negatives()]
        if self.num_dropped:
            said.append(f"{self.num_dropped:,} negatives left out that equal a positive or repeat another")
        if self.num_unscored:
            which = "rows" if self.num_unscored == self.num_rows else f"{self.num_unscored:,} rows"
            said.append(f"{which} without scores: positives count 1, negatives 0")
        if self.ignored:
            more = ", ..." if len(self.ignored) > 8 else ""
            said.append(f"not used: {', '.join(self.ignored[:8])}{more}")
        if self.num_skipped:
            more = "; ..." if self.num_skipped > len(self.problems) else ""
            said.append(f"{self.num_skipped:,} bad rows skipped ({'; '.join(self.problems)}{more})")
        if self.cached:
            said.append("cached")
        return "; ".join(said)

    def counts(self) -> NegativeCounts:
        """Of the negatives that a step uses of its rows."""
        used = self.most_negatives if self.negatives_used is None else self.negatives_used
        return NegativeCounts(
            self.name, min(self.fewest_negatives, used), min(self.most_negatives, used), self.one_text
        )

    def _files(self) -> str:
        # Their names, since a folder may hold files that were not meant, such as a test split.
        names = ", ".join(Path(file).name for file in self.files[:4])
        return f"{len(self.files)} files ({names}{', ...' if len(self.files) > 4 else ''})" if self.files[1:] else names

    def _negatives(self) -> str:
        most, fewest, used = self.most_negatives, self.fewest_negatives, self.negatives_used
        if self.one_text:
            return "one text a row"
        if most == 0:
            return "no negatives"
        if used is not None and used < most:
            drawn = f"{used} drawn each epoch" if used else "none used (negatives=0)"
            return f"rows carry up to {most} negatives, {drawn}"
        return f"{most} negatives a row" if fewest == most else f"{fewest} to {most} negatives a row"


@dataclass
class RowStatistics:
    """What was counted in one piece of a source, or in all of them; places are numbers, so that files may move.

    Attributes:
        problems: the first few, as (part of the source, line, what is wrong); line 0 is the whole part.
        width: of a teacher's vectors, and the part and line of the first; None where there are none.
    """

    num_rows: int = 0
    num_skipped: int = 0
    num_dropped: int = 0
    num_unscored: int = 0
    fewest_negatives: int = 0
    most_negatives: int = 0
    one_text: bool = False
    found: list[str] = field(default_factory=list)  # of the layout
    ignored: list[str] = field(default_factory=list)
    problems: list[tuple[int, int, str]] = field(default_factory=list)
    width: tuple[int, int, int] | None = None

    def add(self, texts: Texts, *, scored: bool) -> None:
        """Count one more row; `scored`: it was given scores that it had not."""
        count = len(texts.negatives)
        self.fewest_negatives = min(self.fewest_negatives, count) if self.num_rows else count
        self.most_negatives = max(self.most_negatives, count)
        self.num_dropped += texts.num_dropped
        self.num_unscored += scored
        self.num_rows += 1
        self.one_text = not texts.positives

    def skip(self, part: int, line: int, problem: str) -> None:
        """Count one more row that cannot be used, or an empty part where the line is 0."""
        self.num_skipped += 1
        if len(self.problems) < MAX_PROBLEMS_SHOWN:
            self.problems.append((part, line, problem))

    def after(self, lines: int) -> "RowStatistics":
        """The same with its lines counted from so many lines before."""
        problems = [(part, lines + line, problem) for part, line, problem in self.problems]
        width = self.width and (self.width[0], self.width[1], lines + self.width[2])
        return replace(self, problems=problems, width=width)

    def join(self, after: "RowStatistics") -> None:
        """Add what was counted in the piece that comes next."""
        if after.num_rows:
            least = after.fewest_negatives
            self.fewest_negatives = min(self.fewest_negatives, least) if self.num_rows else least
            self.most_negatives = max(self.most_negatives, after.most_negatives)
            self.one_text = after.one_text
        for name in ("num_rows", "num_skipped", "num_dropped", "num_unscored"):
            setattr(self, name, getattr(self, name) + getattr(after, name))
        self.found = list(dict.fromkeys([*self.found, *after.found]))
        self.ignored = list(dict.fromkeys([*self.ignored, *after.ignored]))
        self.problems = [*self.problems, *after.problems][:MAX_PROBLEMS_SHOWN]
        self.width = self.width or after.width

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "RowStatistics":
        """What `dataclasses.asdict` made, back from JSON."""
        problems = [(int(part), int(line), str(what)) for part, line, what in facts["problems"]]
        width = None if facts["width"] is None else tuple(facts["width"])
        return cls(**{**facts, "problems": problems, "width": width})

    def report(
        self, name: str, layout: str, parts: Sequence[Part], negatives_used: int | None, *, cached: bool
    ) -> SourceReport:
        """The same for the user, with the places where the files lie now."""
        return SourceReport(
            name,
            layout=layout,
            num_rows=self.num_rows,
            files=[part.name for part in parts],
            num_skipped=self.num_skipped,
            num_dropped=self.num_dropped,
            fewest_negatives=self.fewest_negatives,
            most_negatives=self.most_negatives,
            negatives_used=negatives_used,
            one_text=self.one_text,
            num_unscored=self.num_unscored,
            ignored=self.ignored,
            problems=[f"{place_of(parts[part], line)}: {what}" for part, line, what in self.problems],
            cached=cached,
        )


def place_of(part: Part, line: int) -> str:
    """Where a row is, for messages; line 0 is the whole part."""
    return part.location(line) if line else part.name
