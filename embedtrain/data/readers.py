"""Training sources -> one table of checked rows, and for each source a line that says what was found in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embedtrain.config.needs import Needs
from embedtrain.config.schema import OnError, TrainSource
from embedtrain.data.files import BadRow, raw_rows
from embedtrain.data.layouts import TEXTS_ALONE, Layout, choose_layout
from embedtrain.data.needed import Counts, RowCheck, check_even, check_sources
from embedtrain.data.sources import parts_of, source_names
from embedtrain.data.table import ExampleTable, TableBuilder
from embedtrain.data.types import Texts
from embedtrain.errors import ConfigError, DataError

PROBLEMS_TOLD = 3


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
        return "; ".join(said)

    def add(self, texts: Texts) -> None:
        """Count one more row."""
        count = len(texts.negatives)
        self.fewest_negatives = min(self.fewest_negatives, count) if self.num_rows else count
        self.most_negatives = max(self.most_negatives, count)
        self.num_dropped += texts.num_dropped
        self.num_rows += 1
        self.one_text = not texts.positives

    def counts(self) -> Counts:
        """Of the negatives that a step uses of its rows."""
        used = self.most_negatives if self.negatives_used is None else self.negatives_used
        return Counts(self.name, min(self.fewest_negatives, used), min(self.most_negatives, used), self.one_text)

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


def read_sources(
    sources: Sequence[TrainSource], on_error: OnError, needs: Needs = TEXTS_ALONE
) -> tuple[ExampleTable, list[SourceReport]]:
    """Read every row of every source, so that what is wrong with any is known before training.

    Args:
        sources: `data.train`.
        on_error: stop at the first row that cannot be used, or pass over such rows and count them.
        needs: what the loss asks of every row.

    Raises:
        DataError: a row that cannot be used (`path:line: what is wrong`), a file that cannot be read as a
            whole whatever `on_error` says, or a source without a usable row.
        ConfigError: options of a source that contradict each other or the loss, or no source.
    """
    if not sources:
        raise ConfigError("data.train is empty: name at least one file, folder or Hub data set to train on")
    check_sources(sources, needs)
    builder, check = TableBuilder(), RowCheck(needs)
    reports = [
        _read_source(source, name, on_error, needs, check, builder)
        for source, name in zip(sources, source_names(sources), strict=True)
    ]
    check_even(needs, [report.counts() for report in reports])
    return builder.finish(), reports


def _read_source(
    source: TrainSource, name: str, on_error: OnError, needs: Needs, check: RowCheck, builder: TableBuilder
) -> SourceReport:
    if source.negatives is not None and source.negatives < 0:
        raise ConfigError(f"{source.path}: negatives={source.negatives} must be a number from 0, or null for all")
    parts = parts_of(source)
    report = SourceReport(name, files=[part.name for part in parts], negatives_used=source.negatives)
    layout: Layout | None = None
    builder.start_source()
    for part in parts:
        builder.start_file(part.name)
        line = 0
        for line, values in raw_rows(part, subset=source.subset, split=source.split, columns=source.columns):
            try:
                if isinstance(values, BadRow):
                    raise values
                layout = layout or choose_layout(source, part.kind, values, needs)
                found = layout.texts(values).scaled(source.score_scale)
                texts = check(found)
            except BadRow as bad:
                _stop_or_count(part.place(line), str(bad), on_error, report)
                continue
            report.num_unscored += texts is not found  # the check gave it scores
            report.add(texts)
            builder.add(texts, line)
        if line == 0:
            _stop_or_count(part.name, "holds no rows", on_error, report)
    if layout is None or report.num_rows == 0:
        raise DataError(f"{source.path}: no row that can be trained on{_first_problem(report)}")
    if report.num_unscored == report.num_rows and report.counts().most == 0:
        named = "" if source.columns is None else " that columns names too"
        raise DataError(
            f"{source.path}: there are neither scores nor hard negatives to use, so all pairs would be alike to "
            f"loss={needs.loss}: add scores, such as a column named score{named}, or negatives"
        )
    report.layout, report.ignored = layout.told(), list(layout.ignored)
    return report


def _stop_or_count(place: str, problem: str, on_error: OnError, report: SourceReport) -> None:
    if on_error == OnError.stop:
        raise DataError(f"{place}: {problem}")
    report.num_skipped += 1
    if len(report.problems) < PROBLEMS_TOLD:
        report.problems.append(f"{place}: {problem}")


def _first_problem(report: SourceReport) -> str:
    return f" ({report.num_skipped:,} skipped, the first: {report.problems[0]})" if report.problems else ""
