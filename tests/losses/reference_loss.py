"""A loss against sentence-transformers' class of it, in one process: value and gradient, in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from embedtrain.config.losses import LossConfig
from tests.losses.global_batch import GlobalVectors, run


class Given(nn.Module):
    """Stands in for a SentenceTransformer: its texts are vectors already."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


def assert_equals_reference(
    ranks: Callable[..., list],
    config: LossConfig,
    batch: GlobalVectors,
    theirs: Callable[..., nn.Module],
    labels: Tensor | None,
    *,
    as_pairs: bool = False,
    tolerance: float = 1e-8,
    **arguments: Any,
) -> None:
    """`theirs(model, **arguments)` on the batch's columns, or on its (query, document) pairs, is `config`'s loss.

    Rows have equally many documents. Where theirs is a dict of losses, their sum is meant.
    """
    queries, documents = batch.queries.clone().requires_grad_(), batch.documents.clone().requires_grad_()
    (size,) = set(batch.sizes)
    columns: Sequence[Tensor] = [queries, *(documents[place::size] for place in range(size))]
    if as_pairs:
        columns = [queries.repeat_interleave(size, dim=0), documents]
    loss = theirs(SentenceTransformer(modules=[Given()], device="cpu"), **arguments)
    expected = loss([{"vectors": column} for column in columns], labels)
    if isinstance(expected, dict):
        expected = sum(expected.values())
    expected.backward()

    rows = list(range(len(batch.sizes)))
    (answer,) = ranks(1, run, config, batch, [rows], torch.float64, queries.shape[1])
    torch.testing.assert_close(
        torch.tensor(answer["local_loss"], dtype=torch.float64),
        expected.detach().double(),
        rtol=tolerance,
        atol=tolerance,
    )
    for name, given in (("queries", queries), ("documents", documents)):
        if given.grad is not None:
            torch.testing.assert_close(answer[name], given.grad, rtol=tolerance, atol=tolerance, msg=name)
