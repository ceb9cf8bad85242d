"""Matryoshka losses equal their formulas in float64 on any number of ranks, for all dimensions and for drawn ones."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from embedtrain.config.losses import CosineMSEConfig, MatryoshkaWeighting
from embedtrain.losses.build import matryoshka_weights
from embedtrain.losses.combine import draw
from tests.losses.global_batch import GlobalVectors, check, run, vectors

SIZES = (1, 3, 2, 1)


def cosine_mse(queries: Tensor, documents: Tensor, batch: GlobalVectors) -> Tensor:
    owners = torch.tensor([row for row, size in enumerate(batch.sizes) for _ in range(size)])
    cosines = torch.cosine_similarity(queries[owners], documents, dim=1)
    return (cosines - batch.scores).square().mean()


def truncated_sum(weights: dict[int, float]):
    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        terms = [
            weight * cosine_mse(batch.queries[:, :dim], batch.documents[:, :dim], batch)
            for dim, weight in weights.items()
        ]
        return torch.stack(terms).sum()

    return textbook


def test_weights_of_f2llm(ranks):
    """1 / (k sqrt(d / n)) for the k-th largest n of a vector of d dimensions, in any order of the option."""
    config = CosineMSEConfig(matryoshka_dims=[4, 8, 2], matryoshka_weighting=MatryoshkaWeighting.sqrt)
    weights = {8: 1.0, 4: (4 / 8) ** 0.5 / 2, 2: (2 / 8) ** 0.5 / 3}
    assert matryoshka_weights(config) == pytest.approx([weights[4], weights[8], weights[2]])
    check(ranks, config, vectors(SIZES, scores=True), truncated_sum(weights))


def test_a_batch_is_trained_on_the_largest_and_drawn_dimensions(ranks):
    config = CosineMSEConfig(
        matryoshka_dims=[2, 4, 8, 6], matryoshka_weights=[0.1, 0.2, 1.0, 0.5], matryoshka_per_step=2
    )
    batch = vectors(SIZES, scores=True)
    (found, *_) = ranks(1, run, config, batch, [[0, 1, 2, 3]], torch.float64, 8)
    assert found["metrics"].keys() == {"loss@8", "loss@6"}  # of batch 5, with the seed 0
    check(ranks, config, batch, truncated_sum({8: 1.0, 6: 0.5}))


def test_draws_are_functions_of_seed_and_batch():
    counts = Counter[int]()
    for batch in range(900):
        drawn = draw(3, 2, 7, batch)
        assert drawn == sorted(set(drawn)) == draw(3, 2, 7, batch)
        counts.update(drawn)
    assert all(abs(count - 600) < 60 for count in counts.values())
    assert [draw(9, 3, 7, batch) for batch in range(9)] != [draw(9, 3, 8, batch) for batch in range(9)]
    assert draw(3, 5, 7, 0) == [0, 1, 2]
