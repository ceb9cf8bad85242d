"""What `search` and `mine` print and write for a model, compared with the scores of all documents."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from embedtrain import mine
from tests.commands import call


def assert_found(model: Path, corpus: Path, query: str, scores: torch.Tensor, *more: str) -> str:
    """The four best documents with their scores [D]; returns what the command printed."""
    printed = call("search", f"model={model}", f"corpus={corpus}", f"query={query}", "top_k=4", *more)
    best = zip(*(part.tolist() for part in scores.topk(4)), strict=True)
    names = [f"d{number}" for number in range(len(scores))]
    actual = [line.split()[:2] for line in printed.splitlines() if len(line.split()) > 1 and line.split()[1] in names]
    assert actual == [[f"{score:.3f}", f"d{number}"] for score, number in best]
    return printed


def assert_mined(
    model: Path, queries: Sequence[str], documents: Sequence[str], corpus: Path, scores: torch.Tensor, out: Path
) -> None:
    """Three negatives of each query, whose positive is the document of the same index, by scores [Q, D].

    With the model, and with itself as the teacher.
    """
    rows = [{"query": query, "positive": documents[index]} for index, query in enumerate(queries)]
    options: dict[str, Any] = {"negatives": 3, "precision": "fp32", "scores": True, "corpus": [str(corpus)]}
    options |= {"relative_margin": None, "absolute_margin": None, "max_score": None, "rank_min": 0}
    for teacher in (None, str(model)):
        mined_files = mine(model, rows, out / f"mined-{teacher is None}", teacher=teacher, quiet=True, **options)
        mined = [json.loads(line) for line in mined_files.files[0].read_text().splitlines()]
        for index, row in enumerate(mined):
            negatives = scores[index].clone()
            negatives[index] = -torch.inf
            best = negatives.topk(3)
            assert row["neg"] == [documents[document] for document in best.indices.tolist()]
            expected = [float(scores[index, index]), *best.values.tolist()]
            assert row["pos_scores"] + row["neg_scores"] == pytest.approx(expected, abs=1e-5)
