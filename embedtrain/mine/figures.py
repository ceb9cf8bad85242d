"""What was found, counted row by row, kept on disk with a block's rows, and told as a summary."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from embedtrain.data.sources.values import describe_error
from embedtrain.errors import DataError

MAX_SUSPECTS = 20  # of suspected false negatives and of suspected wrong labels that are kept
QUANTILES = {"min": 0.0, "5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class SuspectedLabel:
    """A row whose labels may be wrong.

    Attributes:
        source: its name.
        place: its file and line.
        query: its text.
        positive: the text of the positive that is meant.
        positive_score: its score.
        document: a candidate that is nearer than it may be, or the best of all.
        score: its score.
        written: whether it is among the negatives that the row got.
    """

    source: str
    place: str
    query: str
    positive: str
    positive_score: float
    document: str
    score: float
    written: bool

    @property
    def order(self) -> tuple[Any, ...]:
        """The worst come first."""
        return self.positive_score - self.score, self.query, self.document, self.positive, not self.written

    @property
    def pair(self) -> tuple[str, str]:
        """What is told once, though several rows may ask it."""
        return self.query, self.document


@dataclass(kw_only=True)
class MiningStats:
    """Of some rows; arrays have one number for each row, positive, or negative.

    Attributes:
        negatives: of each row, how many it got.
        positive_scores: of all positives of all rows.
        negative_scores: of all negatives that are written.
        positive_ranks: from 1, among the candidates; of those that are among the first `rank_max`.
        negative_ranks: from 1, among the candidates, of those that were found.
        num_candidates: that windows held.
        num_above_margin: of them, those that score more than the margin allows.
        num_above_positive: of them, those that score more than the positive that margins are taken from.
        num_lost: positives that are not among the first `rank_max`.
        false_negatives: the nearest candidate of rows where one is above the margin, or above the positive where there
            is no margin; the worst.
        wrong_labels: the farthest positive of rows where one is not among the first `rank_max`, and the row's best
            candidate; the worst.
    """

    negatives: NDArray[np.int64]
    positive_scores: NDArray[np.float32]
    negative_scores: NDArray[np.float32]
    positive_ranks: NDArray[np.int64]
    negative_ranks: NDArray[np.int64]
    num_candidates: int = 0
    num_above_margin: int = 0
    num_above_positive: int = 0
    num_lost: int = 0
    false_negatives: list[SuspectedLabel] = field(default_factory=list)
    wrong_labels: list[SuspectedLabel] = field(default_factory=list)

    def write(self, beside: Path) -> None:
        """Keep them beside a file."""
        facts = {name: getattr(self, name) for name in _COUNTS}
        facts |= {name: [asdict(suspect) for suspect in worst_suspects(getattr(self, name))] for name in _SUSPECTS}
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        np.savez(beside.with_suffix(".npz"), facts=np.array(json.dumps(facts)), **arrays)

    @classmethod
    def read(cls, beside: Path) -> "MiningStats":
        """What `write` kept.

        Raises:
            DataError: it holds something else.
        """
        path = beside.with_suffix(".npz")
        try:
            with np.load(path, allow_pickle=False) as kept:
                facts = json.loads(str(kept["facts"]))
                values: dict[str, Any] = {name: kept[name] for name in _ARRAYS}
            values |= {name: facts[name] for name in _COUNTS}
            values |= {name: [SuspectedLabel(**suspect) for suspect in facts[name]] for name in _SUSPECTS}
        except (OSError, ValueError, LookupError, TypeError, RecursionError, BadZipFile) as error:
            raise DataError(
                f"{path} cannot be read ({describe_error(error)}): write another folder as output_dir="
            ) from error
        return cls(**values)

    @classmethod
    def joined(cls, parts: Sequence["MiningStats"]) -> "MiningStats":
        """All of several, or of none."""
        values: dict[str, Any] = {
            name: np.concatenate([np.empty(0, dtype=kind), *(getattr(part, name) for part in parts)])
            for name, kind in _ARRAYS.items()
        }
        values |= {name: sum(getattr(part, name) for part in parts) for name in _COUNTS}
        for name in _SUSPECTS:
            values[name] = worst_suspects([suspect for part in parts for suspect in getattr(part, name)])
        return cls(**values)

    def summary(self, wanted: int) -> dict[str, Any]:
        """The figures as JSON.

        Args:
            wanted: negatives that a row was to get.
        """
        counts = self.negatives
        return {
            "rows": len(counts),
            "rows_with_fewer_negatives": int((counts < wanted).sum()),
            "rows_without_negatives": int((counts == 0).sum()),
            "negatives": int(counts.sum()),
            "negatives_a_row": quantiles(self.negatives),
            "positive_scores": quantiles(self.positive_scores),
            "negative_scores": quantiles(self.negative_scores),
            "positive_ranks": quantiles(self.positive_ranks),
            "negative_ranks": quantiles(self.negative_ranks),
            "candidates": self.num_candidates,
            "candidates_above_margin": self.num_above_margin,
            "candidates_above_positive": self.num_above_positive,
            "positives": len(self.positive_scores),
            "positives_beyond_rank_max": self.num_lost,
        }


_ARRAYS: dict[str, type] = {
    "negatives": np.int64,
    "positive_scores": np.float32,
    "negative_scores": np.float32,
    "positive_ranks": np.int64,
    "negative_ranks": np.int64,
}
_COUNTS = ("num_candidates", "num_above_margin", "num_above_positive", "num_lost")
_SUSPECTS = ("false_negatives", "wrong_labels")


def quantiles(values: NDArray[Any]) -> dict[str, float] | None:
    """The least, the largest and some between, in the order of QUANTILES; None of no values."""
    if not len(values):
        return None
    found = np.quantile(values.astype(np.float64), list(QUANTILES.values()))
    return dict(zip(QUANTILES, found.tolist(), strict=True))


def worst_suspects(suspects: Sequence[SuspectedLabel]) -> list[SuspectedLabel]:
    """The worst of them, each pair of texts once."""
    once: dict[tuple[str, str], SuspectedLabel] = {}
    for suspect in sorted(suspects, key=lambda suspect: suspect.order):
        once.setdefault(suspect.pair, suspect)
    return list(once.values())[:MAX_SUSPECTS]
