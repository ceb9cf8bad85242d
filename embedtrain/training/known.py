"""What a loss must know of a rank's rows, as tensors: who owns which document, keys, scores, labels, vectors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embedtrain.data.keys import text_keys
from embedtrain.data.types import Row
from embedtrain.losses.types import FROM_ROWS, Guide, LossInput


def known_of(
    rows: Sequence[Row] | None,
    num_documents: Tensor,
    query_keys: Tensor,
    document_keys: Tensor,
    *,
    step: int,
    source: int,
    teacher_dimension: int | None,
) -> LossInput:
    """What the loss must know of B rows with M documents.

    Args:
        rows: None where they hold nothing but texts.
        num_documents: int64 [B], of each row.
        query_keys: int64 [B], see `text_keys`.
        document_keys: int64 [M].
        step: a number that is the same on every rank.
        source: see LossInput.
        teacher_dimension: of the vectors that rows hold, if they do: a rank without rows must know it too.
    """
    owners = torch.repeat_interleave(torch.arange(len(num_documents)), num_documents)
    held = [] if rows is None else list(rows)
    # Ids are a source's own: another's "7" is another document.
    ids = [name and f"{row.source} {name}" for row in held for name in row.ids or [""] * len(row.documents)]
    scores = [score for row in held for score in row.scores]
    labels = [row.label for row in held if row.label is not None]
    # A rank without rows cannot tell whether others' have scores or labels: it has an empty tensor of each.
    return LossInput(
        owners=owners,
        query_keys=query_keys,
        document_keys=document_keys,
        document_ids=_id_keys(ids, document_keys) if any(ids) else None,
        scores=torch.tensor(scores, dtype=torch.float32) if len(scores) == len(owners) else None,
        labels=torch.tensor(labels, dtype=torch.int64) if len(labels) == len(query_keys) else None,
        guides={} if teacher_dimension is None else {FROM_ROWS: _teacher(held, teacher_dimension)},
        seed=step,
        source=source,
    )


def _id_keys(ids: Sequence[str], keys: Tensor) -> Tensor:
    """The key of each id; of a document without one the key of its text."""
    has = torch.tensor([bool(name) for name in ids])
    # A prefix that no text begins with: an id must not look like the text that reads the same.
    return torch.where(has, text_keys([f"\0id {name}" for name in ids]), keys)


def _teacher(rows: Sequence[Row], width: int) -> Guide:
    """The vectors that came with the rows."""
    queries = [np.asarray(row.vectors[0], dtype=np.float32) for row in rows]
    documents = [np.asarray(vector, dtype=np.float32) for row in rows for vector in row.vectors[1:]]
    made = (np.stack(part) if part else np.empty((0, width), dtype=np.float32) for part in (queries, documents))
    return Guide(*(torch.from_numpy(part) for part in made))
