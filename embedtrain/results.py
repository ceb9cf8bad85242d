"""What the functions of the Python API return. A notebook shows each as a table."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from embedtrain.commands.search import Hit
from embedtrain.data.sources.pictures import shown_item
from embedtrain.tracking.metrics import METRICS_FILE, read_metrics
from embedtrain.utils.formatting import format_count

_LAST_LOSSES = 10  # logged steps, over which the last loss of a run is averaged


class Metrics(dict[str, dict[str, float]]):
    """Results of an evaluation: set -> metric -> value. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return "".join(
            html_table(["set", *names], [[name, *(_number(self[name][each]) for each in names)] for name in sets])
            for names, sets in self._by_metrics().items()
        )

    def _by_metrics(self) -> dict[tuple[str, ...], list[str]]:
        """The sets with the same metrics."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, metrics in self.items():
            groups.setdefault(tuple(metrics), []).append(name)
        return groups


@dataclass(frozen=True)
class TrainResult:
    """A finished training run.

    Attributes:
        output_dir: the directory of the run.
        model_dir: the model, which opens with sentence-transformers and transformers.
        step: whose weights were exported: the last, or the best by `checkpoint.best_metric`.
        has_trained: False if the run had finished before this call, which made the evaluation and the export.
        metrics: of these weights: set -> metric -> value; empty if nothing was evaluated at this step.
        metrics_before: those before the first step; empty with `evaluation.at_start=false`.
    """

    output_dir: Path
    model_dir: Path
    step: int
    has_trained: bool
    metrics: Metrics

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: those with `loss` of training steps, those with `set` of evaluations."""
        return read_metrics(self.output_dir / METRICS_FILE)

    @cached_property
    def metrics_before(self) -> Metrics:
        """The metrics before the first step: set -> metric -> value."""
        start = {row["set"]: row for row in self.history if row.get("set") is not None and row["step"] == 0}
        return Metrics(
            {
                name: {metric: start[name][metric] for metric in metrics if metric in start[name]}
                for name, metrics in self.metrics.items()
                if name in start
            }
        )

    def __repr__(self) -> str:
        """The directories, the step, and the first metric of each set."""
        first = {name: dict(list(values.items())[:1]) for name, values in self.metrics.items()}
        return f"TrainResult(model_dir={str(self.model_dir)!r}, step={self.step}, metrics={first})"

    def _repr_html_(self) -> str:
        losses = [row["loss"] for row in self.history if row.get("loss") is not None]
        last = losses[-_LAST_LOSSES:]
        before = Metrics({f"{name}, before training": metrics for name, metrics in self.metrics_before.items()})
        facts = [
            ("model", self.model_dir),
            ("step", f"{self.step:,}{'' if self.has_trained else ', trained by an earlier call'}"),
            *([("loss", f"{losses[0]:.4f} at first, {sum(last) / len(last):.4f} at last")] if losses else []),
        ]
        return html_table([], facts) + Metrics({**before, **self.metrics})._repr_html_()


@dataclass(frozen=True)
class _Rows:
    """Rows of a command, one file for each source, and its statistics."""

    files: list[Path]
    summary: dict[str, Any]

    def __repr__(self) -> str:
        """The files, and the keys of the summary."""
        return f"{type(self).__name__}(files={[str(file) for file in self.files]}, summary={_outline(self.summary)})"

    def _repr_html_(self) -> str:
        return html_table([], [("files", ", ".join(map(str, self.files))), *_facts(self.summary)])


class MineResult(_Rows):
    """Mined rows.

    Attributes:
        files: one for each source; `train(data=files)` reads them.
        summary: statistics of each source and the most suspicious labels: the content of summary.json.
    """


class FilterResult(_Rows):
    """Rows that a filter has kept.

    Attributes:
        files: one for each source; `train(data=files)` reads them.
        summary: statistics of each source and rejected examples: the content of summary.json.
    """


class SplitResult(_Rows):
    """Training rows and an evaluation set without common texts.

    Attributes:
        files: training rows, one file for each source; `train(data=files)` reads them.
        summary: what was written, counted.
    """

    @property
    def dev(self) -> Path:
        """The held-out queries as an evaluation set: `train(evaluation=split.dev)`."""
        return self.files[0].parent / "dev"

    def __repr__(self) -> str:
        """The files, the evaluation set and the counts."""
        files = [str(file) for file in self.files]
        return f"SplitResult(files={files}, dev={str(self.dev)!r}, summary={self.summary})"

    def _repr_html_(self) -> str:
        return html_table([], [("dev", self.dev)]) + super()._repr_html_()


@dataclass(frozen=True)
class SynthesizeResult:
    """Rows of queries that a language model has written.

    Attributes:
        rows: the file; `train(data=result.rows)` reads it.
        summary: what was asked for, thrown away and spent: the content of synthesis.json.
    """

    rows: Path
    summary: dict[str, Any]

    def __repr__(self) -> str:
        """The file, and the keys of the summary."""
        return f"SynthesizeResult(rows={str(self.rows)!r}, summary={_outline(self.summary)})"

    def _repr_html_(self) -> str:
        return html_table([], [("rows", self.rows), *_facts(self.summary)])


@dataclass(frozen=True)
class PlanResult:
    """What a training, a search or a pipeline costs.

    Attributes:
        fits: whether it fits in memory.
        summary: sizes in bytes and times in seconds: what `embedtrain plan json=true` prints.
        text: the tables that `embedtrain plan` prints.
    """

    fits: bool
    summary: dict[str, Any]
    text: str

    def __repr__(self) -> str:
        """Whether it fits, and the keys of the summary."""
        return f"PlanResult(fits={self.fits}, summary={_outline(self.summary)})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


class Hits(list[Hit]):
    """The documents that a query finds, best first. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        rows = [(f"{hit.score:.3f}", hit.id, shown_item(hit.text)) for hit in self]
        return html_table(["score", "id", "text"], rows)


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as HTML, with everything in it escaped."""

    def row(cells: Sequence[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    head = f"<thead>{row(header, 'th')}</thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table>"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _facts(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The numbers and texts of a summary by their full name; of a list its length."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            numbers = all(isinstance(each, int) for each in value)
            yield (
                f"{prefix}{name}",
                ", ".join(map(_number, value)) if numbers else format_count(len(value), "entry", "entries"),
            )
        elif value is not None:
            yield f"{prefix}{name}", _number(value) if isinstance(value, int | float) else str(value)


def _outline(summary: Mapping[str, Any]) -> str:
    return f"{{{', '.join(f'{name!r}: ...' for name in summary)}}}"
