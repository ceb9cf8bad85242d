"""Orthogonal regularisation equals its formula on any number of ranks, and sentence-transformers' class."""

from dataclasses import replace

import pytest
import torch
from sentence_transformers.losses import GlobalOrthogonalRegularizationLoss
from torch import Tensor

from embedtrain.config.losses import OrthogonalConfig, Reduction
from tests.losses.global_batch import GlobalVectors, check, run, run_under_autocast, vectors
from tests.losses.reference_loss import assert_equals_reference

# Nine rows: more than the dimensions (4) among queries, positives; fewer among negatives; one third negative.
SIZES = (1, 2, 1, 4, 2, 1, 3, 1, 1)


def terms(batch: GlobalVectors) -> list[tuple[Tensor, Tensor]]:
    """Both terms of each column with at least two rows, from single cosines."""
    columns = [list(batch.queries)]
    for index in range(max(batch.sizes, default=0)):
        rows = [batch.documents_of(row) for row in range(len(batch.sizes))]
        columns.append([batch.documents[indices[index]] for indices in rows if len(indices) > index])
    actual = []
    for column in columns:
        if len(column) > 1:
            every = torch.cosine_similarity(torch.stack(column)[:, None], torch.stack(column)[None], dim=2)
            cosines = every[~torch.eye(len(column), dtype=torch.bool)]
            first, second = cosines.mean(), cosines.square().mean()
            actual.append((first**2, (second - 1 / batch.queries.shape[1]).clamp(min=0)))
    return actual


def regularised(config: OrthogonalConfig):
    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        actual = [config.mean_weight * first + config.second_moment_weight * second for first, second in terms(batch)]
        total = sum(actual, 0.0 * batch.queries.sum())
        return total / max(1, len(actual)) if config.aggregation is Reduction.mean else total

    return textbook


CONFIGS = [
    OrthogonalConfig(),
    OrthogonalConfig(mean_weight=0.5, second_moment_weight=3.0, aggregation=Reduction.sum),
    OrthogonalConfig(mean_weight=0.0),
    OrthogonalConfig(second_moment_weight=0.0),
]


def clustered(sizes: tuple[int, ...], dimension: int) -> GlobalVectors:
    """Vectors with a common direction, so that no term is 0; not of length 1."""
    batch = vectors(sizes, normalised=False, dimension=dimension)
    return replace(batch, queries=batch.queries + 0.5, documents=batch.documents + 0.7)


@pytest.mark.quick(
    "sum-from the rows",
    "mean-from the Gram matrix",
    "no second moment-from the rows",
    "no mean term-from the Gram matrix",
)
@pytest.mark.parametrize("dimension", [4, 32], ids=["from the Gram matrix", "from the rows"])
@pytest.mark.parametrize("config", CONFIGS, ids=["mean", "sum", "no mean term", "no second moment"])
def test_value_and_gradient(ranks, config, dimension):
    batch = clustered(SIZES, dimension)
    assert all(first > 0 for first, _ in terms(batch))
    check(ranks, config, batch, regularised(config), only=[0, 2, 5, 7])


def test_rows_of_one_text(ranks):
    check(ranks, OrthogonalConfig(), clustered((0,) * 6, 4), regularised(OrthogonalConfig()))


@pytest.mark.parametrize("sizes", [(1,), (3,), (0,)])
def test_columns_of_one_row(ranks, sizes):
    """No column has two rows: loss and gradient are 0."""
    check(ranks, OrthogonalConfig(), clustered(sizes, 4), regularised(OrthogonalConfig()), only=[0, 1, 2, 5])


def test_many_rows(ranks):
    """Nearly independent vectors: means close to 0, computed as differences of large sums."""
    batch = vectors((1,) * 200, dimension=16)
    check(ranks, OrthogonalConfig(), batch, regularised(OrthogonalConfig()), fp32=2e-5, only=[2])


@pytest.mark.parametrize("dimension", [4, 32])
@pytest.mark.parametrize("config", CONFIGS, ids=["mean", "sum", "no mean term", "no second moment"])
def test_equals_sentence_transformers(ranks, config, dimension):
    assert_equals_reference(
        ranks,
        config,
        clustered((2,) * 6, dimension),
        GlobalOrthogonalRegularizationLoss,
        None,
        mean_weight=config.mean_weight,
        second_moment_weight=config.second_moment_weight,
        aggregation=config.aggregation.value,
    )


@pytest.mark.parametrize("dimension", [4, 32])
def test_equal_vectors(ranks, dimension):
    batch = clustered((1,) * 6, dimension)
    batch = replace(batch, queries=batch.queries[:1].expand(6, dimension).contiguous(), documents=batch.queries)
    answers = ranks(2, run, OrthogonalConfig(), batch, [[0, 1], [2, 3, 4, 5]], torch.float64, dimension)
    assert all(answer["queries"].isfinite().all() for answer in answers)
    first, second = (sum(answer["metrics"][name] for answer in answers) for name in ("mean_term", "second_moment_term"))
    others = terms(replace(batch, queries=batch.documents))[0]
    # Cosines of 1 among the queries.
    assert first == pytest.approx((1 + others[0].item()) / 2)
    assert second == pytest.approx((1 - 1 / dimension + others[1].item()) / 2)


@pytest.mark.parametrize("dimension", [4, 32])
def test_autocast_has_no_effect(ranks, dimension):
    ((inside, outside),) = ranks(1, run_under_autocast, OrthogonalConfig(), clustered(SIZES, dimension))
    assert inside == outside
