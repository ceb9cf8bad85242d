"""Statistics of mined rows: collected row by row, stored with each block of rows, merged and printed."""

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sources.values import describe_error
from embedtrain.errors import DataError
from embedtrain.mining.folder import quantiles
from embedtrain.tracking.pages import Page

if TYPE_CHECKING:
    from embedtrain.commands.mine import MineOptions

MAX_SUSPECTS = 20  # of each kind
_MAX_PRINTED = 3  # of each kind
_TEXT_WIDTH = 100  # columns of a printed text; summary.json has the whole texts


@dataclass(frozen=True, kw_only=True)
class SuspectedLabel:
    """A row whose labels may be wrong; stored with these names."""

    source: str
    place: str  # file and line of the row
    query: str
    positive: str  # the text of the positive in question
    positive_score: float
    document: str  # the text of the candidate with the highest score
    score: float  # of the candidate
    written: bool  # whether the candidate is among the row's negatives


@dataclass(kw_only=True)
class MiningStats:
    """Statistics of rows."""

    negatives: NDArray[np.int64]  # the number of negatives of each row
    positive_scores: NDArray[np.float32]
    negative_scores: NDArray[np.float32]
    positive_ranks: NDArray[np.int64]  # from 1, of the positives among the best `rank_max` documents
    negative_ranks: NDArray[np.int64]  # from 1, of the negatives that mining added
    num_candidates: int = 0
    num_above_margin: int = 0  # candidates that score more than the margin allows
    num_above_positive: int = 0  # candidates that score more than the positive that margins refer to
    # The most suspicious rows whose best candidate is above the margin, or above the positive without a margin.
    false_negatives: list[SuspectedLabel] = field(default_factory=list)
    # The most suspicious rows with a positive that is not among the best `rank_max` documents.
    wrong_labels: list[SuspectedLabel] = field(default_factory=list)

    def write(self, beside: Path) -> None:
        """Write them next to a file, with the ending `.npz`."""
        facts = {name: getattr(self, name) for name in _COUNTS}
        facts |= {name: [asdict(suspect) for suspect in worst_suspects(getattr(self, name))] for name in _SUSPECTS}
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        np.savez(beside.with_suffix(".npz"), facts=np.array(json.dumps(facts)), **arrays)

    @classmethod
    def read(cls, beside: Path) -> "MiningStats":
        """Read what `write` wrote, or raise DataError."""
        path = beside.with_suffix(".npz")
        try:
            with np.load(path, allow_pickle=False) as file:
                facts = json.loads(str(file["facts"]))
                values: dict[str, Any] = {name: file[name] for name in _ARRAYS}
            values |= {name: facts[name] for name in _COUNTS}
            values |= {name: [SuspectedLabel(**suspect) for suspect in facts[name]] for name in _SUSPECTS}
        except (OSError, ValueError, LookupError, TypeError, RecursionError, BadZipFile) as error:
            raise DataError(f"{path} cannot be read ({describe_error(error)}): choose another output_dir") from error
        return cls(**values)

    @classmethod
    def merge(cls, parts: Sequence["MiningStats"]) -> "MiningStats":
        """The statistics of all rows of the parts."""
        values: dict[str, Any] = {
            name: np.concatenate([np.empty(0, dtype=dtype), *(getattr(part, name) for part in parts)])
            for name, dtype in _ARRAYS.items()
        }
        values |= {name: sum(getattr(part, name) for part in parts) for name in _COUNTS}
        for name in _SUSPECTS:
            values[name] = worst_suspects([suspect for part in parts for suspect in getattr(part, name)])
        return cls(**values)

    def summary(self, max_negatives: int) -> dict[str, Any]:
        """The statistics as JSON, for rows that should get `max_negatives` negatives each."""
        counts = self.negatives
        return {
            "rows": len(counts),
            "rows_with_fewer_negatives": int((counts < max_negatives).sum()),
            "rows_without_negatives": int((counts == 0).sum()),
            "negatives": int(counts.sum()),
            "negatives_a_row": quantiles(counts),
            "positive_scores": quantiles(self.positive_scores),
            "negative_scores": quantiles(self.negative_scores),
            "positive_ranks": quantiles(self.positive_ranks),
            "negative_ranks": quantiles(self.negative_ranks),
            "candidates": self.num_candidates,
            "candidates_above_margin": self.num_above_margin,
            "candidates_above_positive": self.num_above_positive,
            "positives": len(self.positive_scores),
            "positives_beyond_rank_max": len(self.positive_scores) - len(self.positive_ranks),
        }


_ARRAYS: dict[str, type] = {
    "negatives": np.int64,
    "positive_scores": np.float32,
    "negative_scores": np.float32,
    "positive_ranks": np.int64,
    "negative_ranks": np.int64,
}
_COUNTS = ("num_candidates", "num_above_margin", "num_above_positive")
_SUSPECTS = ("false_negatives", "wrong_labels")


def worst_suspects(suspects: Sequence[SuspectedLabel]) -> list[SuspectedLabel]:
    """The most suspicious, each pair of query and document once."""
    worst: dict[tuple[str, str], SuspectedLabel] = {}
    for suspect in sorted(
        suspects, key=lambda s: (s.positive_score - s.score, s.query, s.document, s.positive, not s.written)
    ):
        worst.setdefault((suspect.query, suspect.document), suspect)
    return list(worst.values())[:MAX_SUSPECTS]


def print_summary(page: Page, summary: Mapping[str, Any], options: "MineOptions") -> None:
    """Print what `Miner.finish` returned."""
    output_dir = options.output_dir
    for name, stats in summary["sources"].items():
        page.heading(name)
        page.facts(_facts(stats, summary, f"{output_dir}/{stats['file']}"))
        if stats["rows_without_negatives"] * 4 > stats["rows"]:
            page.note(f"many rows got no negative: {_advice(options, summary['documents'])}", "yellow")
        _print_quantiles(page, stats, options.rank_max)
    false_negatives = summary["suspected_false_negatives"]
    limit = "above what the margin allows" if _has_margin(options) else "above the positive"
    for written, outcome in (False, "are not among the negatives"), (True, "are written as negatives"):
        print_suspects(
            page,
            f"candidates that score {limit} and {outcome}: perhaps they answer the query",
            [suspect for suspect in false_negatives if suspect["written"] is written],
        )
    texts = operator.itemgetter("query", "positive", "document")
    printed = [texts(suspect) for suspect in false_negatives]
    print_suspects(
        page,
        f"positives that are not among the {summary['rank_max']} best: perhaps they do not answer the query",
        [suspect for suspect in summary["suspected_wrong_labels"] if texts(suspect) not in printed],
    )
    page.subheading(f"{output_dir}/summary.json has all of this, whole texts, and more suspects")


def _has_margin(options: "MineOptions") -> bool:
    return options.relative_margin is not None or options.absolute_margin is not None


def _advice(options: "MineOptions", num_documents: int) -> str:
    """Options that give more negatives of so many documents."""
    lowest = options.margin_reference.is_lowest and _has_margin(options)
    ways = ["margin_reference=highest"] if lowest else []
    if options.rank_max < num_documents:
        ways.append(f"rank_max={4 * options.rank_max}")
    if options.relative_margin is not None:
        ways.append(f"relative_margin={options.relative_margin / 2:g} or null")
    if options.absolute_margin is not None:
        ways.append(f"absolute_margin={options.absolute_margin / 2:g} or null")
    ways += [f"another {name}" for name in ("max_score", "min_score") if getattr(options, name) is not None]
    if options.rank_min:
        ways.append("a smaller rank_min")
    if len(ways) < 2:
        return f"write {ways[0]}, or give a corpus=" if ways else "give a corpus="
    return f"write {', '.join(ways[:-1])} or {ways[-1]}"


def _facts(stats: Mapping[str, Any], summary: Mapping[str, Any], path: str) -> list[tuple[str, str]]:
    rows, max_negatives = stats["rows"], summary["negatives_wanted"]
    facts = [("rows", f"{rows:,} in {path}"), ("negatives", f"{stats['negatives']:,}, at most {max_negatives} per row")]
    fewer, none = stats["rows_with_fewer_negatives"], stats["rows_without_negatives"]
    if fewer:
        facts.append(("", f"{_with_percentage(fewer, rows)} of rows have fewer, {_with_percentage(none, rows)} none"))
    candidates = stats["candidates"]
    for key, description in (
        ("candidates_above_margin", "above the margin: they are not selected, and may be false negatives"),
        ("candidates_above_positive", "above the positive itself"),
    ):
        if stats[key]:
            facts.append(("candidates", f"{_with_percentage(stats[key], candidates)} {description}"))
    beyond = stats["positives_beyond_rank_max"]
    if beyond:
        text = f"{_with_percentage(beyond, stats['positives'])} not among the {summary['rank_max']} best"
        facts.append(("positives", text))
    return facts


def _print_quantiles(page: Page, stats: Mapping[str, Any], rank_max: int) -> None:
    labels = (
        ("positive scores", "positive_scores", ".4f"),
        ("negative scores", "negative_scores", ".4f"),
        (f"positive ranks, of those among the best {rank_max}", "positive_ranks", ".0f"),
        ("negative ranks", "negative_ranks", ".0f"),
        ("negatives per row", "negatives_a_row", ".0f"),
    )
    available = [(label, stats[key], spec) for label, key, spec in labels if stats[key] is not None]
    rows = [[label, *(format(value, spec) for value in values.values())] for label, values, spec in available]
    if rows:
        page.table(["", *available[0][1]], rows)


def print_suspects(page: Page, title: str, suspects: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of `SuspectedLabel`, the most suspicious first; nothing without any."""
    if not suspects:
        return
    page.subheading(title)
    for suspect in suspects[:_MAX_PRINTED]:
        page.texts(
            [
                ("query", "", suspect["query"]),
                ("positive", f"{suspect['positive_score']:.4f}", suspect["positive"]),
                ("candidate", f"{suspect['score']:.4f}", suspect["document"]),
            ],
            plain_width=_TEXT_WIDTH,
        )


def _with_percentage(part: int, total: int) -> str:
    return f"{part:,} ({part / max(1, total):.1%})"
