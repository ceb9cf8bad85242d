"""Statistics of mined rows: collected row by row, stored with each block of rows, merged into the summary."""

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

MAX_SUSPECTS = 20  # of each kind
QUANTILES = {"min": 0.0, "5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class SuspectedLabel:
    """A row whose labels may be wrong; stored with these names.

    Attributes:
        source: its name.
        place: file and line of the row.
        query: its text.
        positive: the text of the positive in question.
        positive_score: its score.
        document: the text of the candidate with the highest score.
        score: its score.
        written: whether the candidate is among the row's negatives.
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
    def sort_key(self) -> tuple[Any, ...]:
        """Sorts the most suspicious first."""
        return self.positive_score - self.score, self.query, self.document, self.positive, not self.written


@dataclass(kw_only=True)
class MiningStats:
    """Statistics of some rows.

    Attributes:
        negatives: the number of negatives of each row.
        positive_scores: of all positives.
        negative_scores: of all negatives.
        positive_ranks: ranks, from 1, of the positives among the best `rank_max` documents.
        negative_ranks: ranks, from 1, of the negatives that mining added.
        num_candidates: of all rows.
        num_above_margin: candidates that score more than the margin allows.
        num_above_positive: candidates that score more than the positive that margins refer to.
        false_negatives: rows whose best candidate is above the margin, or above the positive without a margin; the most
            suspicious.
        wrong_labels: rows with a positive that is not among the best `rank_max` documents; the most suspicious.
    """

    negatives: NDArray[np.int64]
    positive_scores: NDArray[np.float32]
    negative_scores: NDArray[np.float32]
    positive_ranks: NDArray[np.int64]
    negative_ranks: NDArray[np.int64]
    num_candidates: int = 0
    num_above_margin: int = 0
    num_above_positive: int = 0
    false_negatives: list[SuspectedLabel] = field(default_factory=list)
    wrong_labels: list[SuspectedLabel] = field(default_factory=list)

    def write(self, beside: Path) -> None:
        """Write them next to a file, with the ending `.npz`."""
        facts = {name: getattr(self, name) for name in _COUNTS}
        facts |= {name: [asdict(suspect) for suspect in worst_suspects(getattr(self, name))] for name in _SUSPECTS}
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        np.savez(beside.with_suffix(".npz"), facts=np.array(json.dumps(facts)), **arrays)

    @classmethod
    def read(cls, beside: Path) -> "MiningStats":
        """Read what `write` wrote.

        Raises:
            DataError: the file holds something else.
        """
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
            "negatives_a_row": quantiles(self.negatives),
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


def quantiles(values: NDArray[Any]) -> dict[str, float] | None:
    """The quantiles of QUANTILES; None without values."""
    if not len(values):
        return None
    results = np.quantile(values.astype(np.float64), list(QUANTILES.values()))
    return dict(zip(QUANTILES, results.tolist(), strict=True))


def worst_suspects(suspects: Sequence[SuspectedLabel]) -> list[SuspectedLabel]:
    """The most suspicious, each pair of query and document once."""
    worst: dict[tuple[str, str], SuspectedLabel] = {}
    for suspect in sorted(suspects, key=lambda suspect: suspect.sort_key):
        worst.setdefault((suspect.query, suspect.document), suspect)
    return list(worst.values())[:MAX_SUSPECTS]
