"""Rows written as JSON in FlagEmbedding's layout, which the reader of training rows restores."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from embedtrain.data.texts import Texts

if TYPE_CHECKING:
    from embedtrain.data.types import Example  # imports torch


def format_row(
    row: "Example | Texts",
    negatives: Sequence[str],
    ids: Sequence[str],
    scores: tuple[Sequence[float], Sequence[float]] | None,
) -> str:
    """The row with `negatives` instead of its own, as JSON in FlagEmbedding's layout, which our reader restores.

    `ids` has one per negative, "" for none, or is empty; `scores` has float32 scores of positives and of negatives.
    """
    query, positives = row.query, list(row.positives)
    fields: dict[str, Any] = {"query": query, "pos": positives, "neg": list(negatives)}
    symmetric = row.document_instruction is not None and row.document_instruction == row.instruction
    if row.document_instruction is not None and (row.max_negatives is not None or not symmetric):
        document_instruction = row.document_instruction
        fields["query"] = [row.instruction or "", query]
        fields["pos"] = [[document_instruction, text] for text in positives]
        fields["neg"] = [[document_instruction, text] for text in negatives]
    elif row.instruction is not None:
        fields["prompt"] = row.instruction
        if symmetric:
            fields["type"] = "symmetric_sts"
    if row.max_negatives is not None:
        fields["type"] = "only_1neg"
    if row.positive_ids:
        fields["pos_id"] = [name or None for name in row.positive_ids]
    if ids:
        fields["neg_id"] = [name or None for name in ids]
    if scores is not None:
        # The shortest decimals that round to the same float32: 0.9, not 0.8999999761581421.
        fields["pos_scores"], fields["neg_scores"] = ([float(str(np.float32(s))) for s in values] for values in scores)
    return json.dumps(fields, ensure_ascii=False)
