"""Compares a loss with the class of sentence-transformers in one process: value and gradient, in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from embedtrain.config.losses import LossConfig
from tests.losses.global_batch import GlobalVectors, run


class PrecomputedVectors(nn.Module):
    """The only module of a SentenceTransformer whose inputs are vectors."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


def assert_equals_reference(
    ranks: Callable[..., list],
    config: LossConfig,
    batch: GlobalVectors,
    reference: Callable[..., nn.Module],
    labels: Tensor | None,
    *,
    as_pairs: bool = False,
    tolerance: float = 1e-8,
    **arguments: Any,
) -> None:
    """`reference(model, **arguments)` of the batch's columns, or of its pairs, equals the loss of `config`.

    Rows have the same number of documents. A dict of losses is summed.
    """
    queries, documents = batch.queries.clone().requires_grad_(), batch.documents.clone().requires_grad_()
    (size,) = set(batch.sizes)
    columns: Sequence[Tensor] = [queries, *(documents[position::size] for position in range(size))]
    if as_pairs:
        columns = [queries.repeat_interleave(size, dim=0), documents]
    loss = reference(SentenceTransformer(modules=[PrecomputedVectors()], device="cpu"), **arguments)
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
    for name, vectors in (("queries", queries), ("documents", documents)):
        if vectors.grad is not None:
            torch.testing.assert_close(answer[name], vectors.grad, rtol=tolerance, atol=tolerance, msg=name)
