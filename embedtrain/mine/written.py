"""A mined row as a line of JSON in FlagEmbedding's layout, which the project's own reader makes the same row of."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embedtrain.data.types import Example


@dataclass(frozen=True, slots=True)
class MinedNegatives:
    """What a row gets.

    Attributes:
        texts: best first.
        ids: of each, "" for one that its source does not name; empty where the source names none of them.
    """

    texts: Sequence[str]
    ids: Sequence[str]


def format_row(row: Example, negatives: MinedNegatives, scores: tuple[Sequence[float], Sequence[float]] | None) -> str:
    """The row with these negatives instead of its own.

    Args:
        row: as it was read.
        negatives: what it gets.
        scores: float32, of its positives and of its negatives; None: none are written.
    """
    query, positives, texts = row.query, list(row.positives), list(negatives.texts)
    fields: dict[str, Any] = {"query": query, "pos": positives, "neg": texts}
    symmetric = row.document_instruction is not None and row.document_instruction == row.instruction
    if row.document_instruction is not None and (row.most_negatives is not None or not symmetric):
        of_documents = row.document_instruction
        fields["query"] = [row.instruction or "", query]
        fields["pos"] = [[of_documents, text] for text in positives]
        fields["neg"] = [[of_documents, text] for text in texts]
    elif row.instruction is not None:
        fields["prompt"] = row.instruction
        if symmetric:
            fields["type"] = "symmetric_sts"
    if row.most_negatives is not None:
        fields["type"] = "only_1neg"
    if row.positive_ids:
        fields["pos_id"] = [name or None for name in row.positive_ids]
    if negatives.ids:
        fields["neg_id"] = [name or None for name in negatives.ids]
    if scores is not None:
        fields["pos_scores"], fields["neg_scores"] = (list(map(_short, some)) for some in scores)
    return json.dumps(fields, ensure_ascii=False)


def _short(score: float) -> float:
    """The shortest number that is the same in float32: 0.9 and not 0.8999999761581421."""
    return float(str(np.float32(score)))
