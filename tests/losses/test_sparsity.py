"""Regularizers of sparse models: means over the texts of all ranks, whatever their number."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from embedtrain.config.kind_settings import SparseRegularizer, SparsityConfig
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.distributed.world import World
from embedtrain.kinds.sparse.score import WordScore
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.sparsity import SparsityRegularized, sparsity_warning
from embedtrain.losses.types import BatchInfo, Origin

CONFIG = SparsityConfig(query_weight=0.7, document_weight=0.4, ramp=0)
# Rows of each rank.
RANKS = [(6,), (2, 4), (5, 0, 1)]


def weights() -> tuple[Tensor, Tensor]:
    """Of 6 queries and 12 documents, a third of them 0; a text is empty, and a word is in one text only."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(18, 10, generator=generator, dtype=torch.float64).add(0.4).clamp(min=0.0)
    values[4], values[:, 2] = 0.0, 0.0
    values[7, 2] = 1.0
    return values[:6].clone(), values[6:].clone()


def local_loss(
    world: World, config: SparsityConfig, ramp: float, step: int, counts: tuple[int, ...]
) -> tuple[float, Tensor, Tensor, dict[str, float]]:
    first, number = sum(counts[: world.rank]), counts[world.rank]
    queries, documents = weights()
    queries = queries[first : first + number].requires_grad_()
    documents = documents[2 * first : 2 * (first + number)].requires_grad_()
    keys = torch.arange(first, first + number)
    batch_info = BatchInfo(
        owners=torch.arange(number).repeat_interleave(2),
        query_keys=keys,
        document_keys=torch.arange(2 * first, 2 * (first + number)) + 100,
        origin=Origin(batch=step),
    )
    loss = SparsityRegularized(InfoNCE(InfoNCEConfig(), WordScore()), config, ramp)
    output = loss(queries, documents, batch_info)
    output.local_loss.backward()
    values = {name: value.item() for name, value in output.metrics.items()}
    return output.local_loss.item(), queries.grad, documents.grad, values


def textbook(config: SparsityConfig, growth: float) -> tuple[float, Tensor, Tensor]:
    queries, documents = (values.requires_grad_() for values in weights())
    scores = queries @ documents.T
    loss = torch.nn.functional.cross_entropy(scores, 2 * torch.arange(6))
    for values, factor, kind, threshold in (
        (queries, config.query_weight, config.query_regularizer, config.query_threshold),
        (documents, config.document_weight, config.document_regularizer, config.document_threshold),
    ):
        if kind is SparseRegularizer.l1:
            value = values.sum(dim=1).mean()
        else:
            kept = (values > 0).sum(dim=1) > (-1 if threshold is None else threshold)
            value = (values * kept[:, None]).mean(dim=0).square().sum()
        loss = loss + growth * factor * value
    loss.backward()
    return loss.item(), queries.grad, documents.grad


@pytest.mark.parametrize(
    ("config", "ramp", "step"),
    [
        (CONFIG, 0, 0),
        (replace(CONFIG, query_regularizer=SparseRegularizer.l1), 10, 3),
        (replace(CONFIG, query_threshold=5, document_threshold=6), 10, 20),
    ],
    ids=["flops", "l1_and_ramp", "thresholds"],
)
@pytest.mark.parametrize("counts", RANKS, ids=str)
def test_loss_and_gradients_are_those_of_one_process(ranks, counts, config, ramp, step):
    growth = min(1.0, (step + 1) / ramp) ** 2 if ramp else 1.0
    loss, *grads = textbook(config, growth)
    answers = ranks(len(counts), local_loss, config, ramp, step, counts)
    assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-12)
    for index, expected in enumerate(grads, start=1):
        torch.testing.assert_close(torch.cat([answer[index] for answer in answers]), expected, rtol=1e-10, atol=1e-12)
    metrics = {name: sum(answer[3][name] for answer in answers) for name in answers[0][3]}
    queries, documents = weights()
    active = (documents > 0).sum(dim=1).double()
    assert metrics["queries/empty_texts"] == pytest.approx(1 / 6)
    assert (
        metrics["queries/flops"] == pytest.approx(queries.mean(dim=0).square().sum().item()) or config.query_threshold
    )
    assert metrics["documents/active_words"] == pytest.approx(active.mean().item())
    assert metrics["documents/active_words_p99"] == pytest.approx(active.sort().values[10].item())


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"queries/empty_texts": 1.0}, "queries .*sparsity.query_weight"),
        ({"documents/density": 0.9}, "documents .*90%.*sparsity.document_weight"),
        ({"documents/density": 0.9, "sparsity_ramp": 0.5}, None),
        ({}, None),
    ],
    ids=["empty", "dense", "dense_at_first", "sparse"],
)
def test_advice(changes, pattern):
    measures = {"queries/density": 0.01, "documents/density": 0.02, "queries/empty_texts": 0.0, "sparsity_ramp": 1.0}
    warning = sparsity_warning(measures | changes)
    assert warning is None if pattern is None else re.search(pattern, warning)
