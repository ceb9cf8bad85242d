"""What a filter kept: counts, the distribution of ranks and scores, and examples of what it rejected."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from embedtrain.commands.filter.options import FilterOptions
from embedtrain.mining.folder import quantiles
from embedtrain.tracking.pages import Page

_RANKS = (1, 2, 5, 10, 20, 50, 100, 1000)
_TEXT_WIDTH = 100  # columns of a printed text; summary.json has the whole texts


@dataclass(frozen=True, kw_only=True)
class SourceSummary:
    """The results of one source with P positives."""

    MAX_EXAMPLES: ClassVar[int] = 20

    rows: int
    kept_rows: int
    shortened_rows: int  # kept rows with fewer positives than before
    kept_positives: int
    beyond_rank: int  # positives whose rank is above keep_rank
    below_score: int  # other positives whose score is below min_score
    ranks: NDArray[np.int64]  # [P]
    scores: NDArray[np.float32]  # [P]
    examples: list[dict[str, Any]]  # the first rejected positives

    def to_json(self, name: str, rejected: str | None) -> dict[str, Any]:
        """For summary.json; `rejected` is the directory of rejected rows, None if none are."""
        return {
            "file": f"{name}.jsonl",
            "rejected_file": None if rejected is None else f"{rejected}/{name}.jsonl",
            "rows": self.rows,
            "kept_rows": self.kept_rows,
            "rows_with_fewer_positives": self.shortened_rows,
            "positives": len(self.ranks),
            "kept_positives": self.kept_positives,
            "positives_beyond_keep_rank": self.beyond_rank,
            "positives_below_min_score": self.below_score,
            "positives_by_rank": {str(rank): int((self.ranks <= rank).sum()) for rank in _RANKS},
            "scores": quantiles(self.scores),
            "rejected": self.examples,
        }


def print_summary(page: Page, summary: Mapping[str, Any], options: FilterOptions) -> None:
    """Print what `ConsistencyFilter.finish` returned."""
    for name, source in summary["sources"].items():
        positives = source["positives"]
        page.heading(name)
        path = f"{options.output_dir}/{source['file']}"
        if options.annotate:
            page.facts([("rows written", f"{source['rows']:,} in {path}, with the columns rank and score")])
        else:
            page.facts(_kept_facts(source, path, options))
        counts = source["positives_by_rank"]
        page.table(
            ["rank at most", *counts],
            [["positives", *(f"{count / max(1, positives):.1%}" for count in counts.values())]],
        )
        if source["scores"] is not None:
            page.table(["", *source["scores"]], [["scores", *(f"{value:.4f}" for value in source["scores"].values())]])
        for example in [] if options.annotate else source["rejected"][:3]:
            page.texts(
                [
                    ("query", "", example["query"]),
                    (f"rank {example['rank']:,}", f"{example['score']:.4f}", example["positive"]),
                ],
                plain_width=_TEXT_WIDTH,
            )
    if not options.annotate:
        page.subheading(f"{options.output_dir}/rejected/ has the rejected positives with their ranks and scores")


def _kept_facts(source: Mapping[str, Any], path: str, options: FilterOptions) -> list[tuple[str, str]]:
    positives = source["positives"]
    facts = [("rows kept", f"{_of(source['kept_rows'], source['rows'])} in {path}")]
    if source["rows_with_fewer_positives"]:
        facts.append(("", f"{source['rows_with_fewer_positives']:,} of these have fewer positives than before"))
    facts.append(("positives kept", _of(source["kept_positives"], positives)))
    if options.keep_rank is not None:
        beyond = source["positives_beyond_keep_rank"]
        facts.append(("rejected", f"{_of(beyond, positives)} have a rank above keep_rank={options.keep_rank}"))
    if options.min_score is not None:
        below = source["positives_below_min_score"]
        further = "further " * (options.keep_rank is not None)
        text = f"{further}{_of(below, positives)} score less than min_score={options.min_score:g}"
        facts.append(("rejected", text))
    return facts


def _of(part: int, total: int) -> str:
    return f"{part:,} of {total:,} ({part / max(1, total):.1%})"
