"""The definition of mining, plainly: all scores in one process, one row after the other, texts compared as texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Score = Callable[[str, Sequence[str]], np.ndarray]


def documents_of(sources: Sequence[Sequence[Mapping[str, Any]]], corpus: Sequence[str]) -> list[str]:
    """Every distinct document in the order in which it is first met."""
    texts = [text for rows in sources for row in rows for text in (*row["pos"], *row.get("neg", ()))]
    return list(dict.fromkeys([*texts, *corpus]))


def mine_reference(
    sources: Sequence[Sequence[Mapping[str, Any]]],
    corpus: Sequence[str],
    found_by: Score,
    *,
    negatives: int,
    rank_max: int,
    rank_min: int = 0,
    relative: float | None = None,
    absolute: float | None = None,
    highest: bool = False,
    keep_own: bool = False,
    judged_by: Score | None = None,
    logits: bool = False,
) -> list[list[tuple[list[str], list[float], list[float]]]]:
    """For each row of each source its negatives, their scores, and those of its positives."""
    documents = documents_of(sources, corpus)
    everything = [row for rows in sources for row in rows]
    mined = []
    for number, rows in enumerate(sources):
        mined.append([_row(row, number, sources, everything, documents, found_by, judged_by or found_by,
                           negatives, rank_min, rank_max, relative, absolute, highest, keep_own, logits)
                      for row in rows])  # fmt: skip
    return mined


def _row(row, number, sources, everything, documents, found_by, judged_by,
         negatives, rank_min, rank_max, relative, absolute, highest, keep_own, logits):  # fmt: skip
    def same(other: Mapping[str, Any]) -> bool:
        return other["query"] == row["query"] and (other.get("prompt") or "") == (row.get("prompt") or "")

    def same_text(other: Mapping[str, Any]) -> bool:
        return other["query"].strip() == row["query"].strip()

    answers = list(dict.fromkeys(text for other in everything if same(other) for text in other["pos"]))
    not_negatives = {text for other in everything if same_text(other) for text in other["pos"]}
    ids = [{name for other in rows if same_text(other) for name in other.get("pos_id", ()) if name} for rows in sources]
    named = {
        text
        for of_source, rows in zip(ids, sources, strict=True)
        for other in rows
        for kind in ("pos", "neg")
        for text, name in zip(other.get(kind, ()), other.get(f"{kind}_id", ()), strict=False)
        if name in of_source
    }
    bare = {text.strip() for text in (*not_negatives, *named, row["query"])}
    excluded = {text for text in documents if text.strip() in bare}
    similarities = found_by(row["query"], documents)
    order = sorted(range(len(documents)), key=lambda index: (-similarities[index], index))
    window = [index for index in order if documents[index] not in excluded][:rank_max]
    scores = judged_by(row["query"], documents)
    of_answers = [scores[documents.index(text)] for text in answers]
    reference = max(of_answers) if highest else min(of_answers)
    limit = np.inf
    if relative is not None:
        if logits:  # a fraction of the probability
            probability = (1 - relative) / (1 + np.exp(-reference))
            limit = min(limit, np.log(probability / (1 - probability)))
        else:
            limit = min(limit, reference - relative * abs(reference))
    if absolute is not None:
        limit = min(limit, reference - absolute)
    qualified = sorted((index for index in window if scores[index] <= limit), key=lambda index: -scores[index])
    existing = {text.strip(): text for text in reversed(row.get("neg", ())) if text not in excluded} if keep_own else {}
    existing_negatives = [documents.index(text) for text in row.get("neg", ()) if text in existing.values()]
    more_negatives = [index for index in qualified[rank_min:] if documents[index].strip() not in existing]
    chosen = [*existing_negatives, *more_negatives[: max(0, negatives - len(existing_negatives))]]
    return (
        [documents[index] for index in chosen],
        [float(scores[index]) for index in chosen],
        [float(scores[documents.index(text)]) for text in row["pos"]],
    )
