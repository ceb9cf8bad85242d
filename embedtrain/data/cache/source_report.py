"""Statistics of training rows: of a piece and of a source, and what is reported of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from embedtrain.data.cache.row_checks import NegativeCounts
from embedtrain.data.sources.parts import Part
from embedtrain.data.texts import Texts

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

    def describe(self, parts: Sequence[Part]) -> str:
        """`path:2, 5, 9 and 34 more: problem`."""
        written = []
        for index, row in enumerate(self.first):
            same_part = index > 0 and row[0] == self.first[index - 1][0] and row[1] > 0
            written.append(str(row[1]) if same_part else _location(parts, *row))
        more = self.num_rows - len(self.first)
        return f"{', '.join(written)}{f' and {more:,} more' if more else ''}: {self.problem}"


def _location(parts: Sequence[Part], part: int, line: int) -> str:
    return parts[part].location(line) if line else parts[part].name


@dataclass(kw_only=True)
class _Counts:
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


@dataclass(kw_only=True)
class SourceReport(_Counts):
    """Statistics of one source for the user."""

    name: str
    layout: str = ""
    files: list[str] = field(default_factory=list)
    left_out: Sequence[str] = ()  # files of other splits
    negatives_used: int | None = None
    problems: list[str] = field(default_factory=list)  # the first few of those skipped
    skipped: list[str] = field(default_factory=list)  # the same, those with the same problem together
    cached: bool = False  # nothing had to be read

    def __str__(self) -> str:
        """One line for the user."""
        parts = [f"{self.name}: {self.layout}, {self.num_rows:,} rows from {self._files()}", self._negatives()]
        if self.left_out:
            parts.insert(1, f"left out: {_names(self.left_out)} (another split by name)")
        parts += [f"{self.num_left_out:,} other rows left out by `where`"] if self.num_left_out else []
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} negatives left out that equal a positive or repeat another")
        if self.num_unscored:
            which = "rows" if self.num_unscored == self.num_rows else f"{self.num_unscored:,} rows"
            parts.append(f"{which} without scores: positives count 1, negatives 0")
        if self.ignored:
            more = ", ..." if len(self.ignored) > 8 else ""
            parts.append(f"not used: {', '.join(self.ignored[:8])}{more}")
        if self.num_skipped:
            parts.append(f"{self.num_skipped:,} bad rows skipped ({'; '.join(self.skipped)})")
        if self.cached:
            parts.append("cached")
        return "; ".join(parts)

    def counts(self) -> NegativeCounts:
        """The numbers of negatives that a step uses."""
        used = self.most_negatives if self.negatives_used is None else self.negatives_used
        return NegativeCounts(
            self.name, min(self.fewest_negatives, used), min(self.most_negatives, used), self.one_text
        )

    def _files(self) -> str:
        # By name, since a folder may hold files that are not intended, such as a test split.
        names = _names(self.files)
        return f"{len(self.files)} files ({names})" if self.files[1:] else names

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


def _names(files: Sequence[str]) -> str:
    return ", ".join(Path(file).name for file in files[:4]) + ", ..." * (len(files) > 4)


@dataclass(kw_only=True)
class RowStatistics(_Counts):
    """Statistics of one piece of a source, or of all; parts are numbers, so that files may move."""

    features: list[str] = field(default_factory=list)  # of the layout
    skipped: list[SkippedRows] = field(default_factory=list)  # in the order of their first rows
    width: tuple[int, int, int] | None = None  # dimension of a teacher's vectors; part and line of the first

    def add(self, texts: Texts, *, scored: bool) -> None:
        """Count one row; `scored`: it had no scores and RowCheck added them."""
        count = len(texts.negatives)
        self.fewest_negatives = min(self.fewest_negatives, count) if self.num_rows else count
        self.most_negatives = max(self.most_negatives, count)
        self.num_dropped, self.num_unscored = self.num_dropped + texts.num_dropped, self.num_unscored + scored
        self.num_rows += 1
        self.one_text = not texts.positives

    def skip(self, part: int, line: int, problem: str) -> None:
        """Count one row that cannot be used, or an empty part if the line is 0."""
        self.num_skipped += 1
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
        if after.num_rows:
            fewest = after.fewest_negatives
            self.fewest_negatives = min(self.fewest_negatives, fewest) if self.num_rows else fewest
            self.most_negatives = max(self.most_negatives, after.most_negatives)
            self.one_text = after.one_text
        for name in ("num_rows", "num_skipped", "num_left_out", "num_dropped", "num_unscored"):
            setattr(self, name, getattr(self, name) + getattr(after, name))
        for name in ("features", "ignored"):
            setattr(self, name, list(dict.fromkeys([*getattr(self, name), *getattr(after, name)])))
        for group in after.skipped:
            self._group(group.problem).add(group.num_rows, group.first)
        self.width = self.width or after.width

    @classmethod
    def of(cls, values: dict[str, Any]) -> "RowStatistics":
        """From the result of `dataclasses.asdict` in JSON."""
        skipped = [SkippedRows(**{**group, "first": list(map(tuple, group["first"]))}) for group in values["skipped"]]
        width = None if values["width"] is None else tuple(values["width"])
        return cls(**{**values, "skipped": skipped, "width": width})

    def report(
        self, name: str, layout: str, parts: Sequence[Part], negatives_used: int | None, *, cached: bool
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
            **{count.name: getattr(self, count.name) for count in fields(_Counts)},
        )
