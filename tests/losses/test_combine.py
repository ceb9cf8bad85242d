"""Matryoshka losses of dimensions and of layers equal their formulas in float64, for all and for drawn ones."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from embedtrain.config.loss_checks import dim_weights
from embedtrain.config.losses import (
    CombinedConfig,
    CosineMSEConfig,
    LayerWeighting,
    LossConfig,
    MatryoshkaConfig,
    MatryoshkaWeighting,
)
from embedtrain.distributed.world import World
from embedtrain.losses.build import build_losses
from embedtrain.losses.combine import Drawn, draw
from embedtrain.losses.encoded import Encoded, Part
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
    config = CosineMSEConfig(matryoshka=MatryoshkaConfig(dims=[4, 8, 2], dim_weighting=MatryoshkaWeighting.sqrt))
    weights = {8: 1.0, 4: (4 / 8) ** 0.5 / 2, 2: (2 / 8) ** 0.5 / 3}
    assert dim_weights(config.matryoshka) == pytest.approx([weights[4], weights[8], weights[2]])
    check(ranks, config, vectors(SIZES, scores=True), truncated_sum(weights))


def test_a_batch_is_trained_on_the_largest_and_drawn_dimensions(ranks):
    config = CosineMSEConfig(
        matryoshka=MatryoshkaConfig(dims=[2, 4, 8, 6], dim_weights=[0.1, 0.2, 1.0, 0.5], dims_per_step=2)
    )
    batch = vectors(SIZES, scores=True)
    (actual, *_) = ranks(1, run, config, batch, [[0, 1, 2, 3]], torch.float64, 8)
    assert actual["metrics"].keys() == {"loss@8", "loss@6"}  # of batch 5, with the seed 0
    check(ranks, config, batch, truncated_sum({8: 1.0, 6: 0.5}))


def of_layers(world: World, configs: list[LossConfig]) -> list[dict[str, float]]:
    """Loss and metrics of each, for an encoder whose further parts are the vectors after 2 and 5 layers."""
    batch = vectors(SIZES, scores=True)
    _, _, batch_info = batch.of_rank([0, 1, 2, 3], torch.float64)
    actual = []
    for config in configs:
        loss = build_losses([config, OTHER], dimension=8, guide_dimensions=[{}, {}], seed=0).for_source(0)
        queries, documents = (
            Encoded(tuple(Part(values + number) for number in range(3))) for values in (batch.queries, batch.documents)
        )
        output = loss(queries, documents, batch_info)
        torch.testing.assert_close(output.row_losses.sum(), output.local_loss)
        actual.append({"loss": float(output.local_loss), **{name: float(v) for name, v in output.metrics.items()}})
    return actual


OTHER = CosineMSEConfig(matryoshka=MatryoshkaConfig(layers=[5, 2]))


def test_layers_of_sources_and_of_parts(ranks):
    """Every loss takes its own layers of those that the encoder returns for all losses; none: the last layer."""
    batch = vectors(SIZES, scores=True)
    last, second, fifth = (
        float(cosine_mse(batch.queries + number, batch.documents + number, batch)) for number in range(3)
    )
    parts = [CosineMSEConfig(weight=3.0), CosineMSEConfig(matryoshka=MatryoshkaConfig(layers=[2]))]
    cases = {
        last: CosineMSEConfig(),
        last + (second + fifth) / 2: replace(OTHER),
        last + (second / 2 + fifth / 5) / 2: replace(
            OTHER, matryoshka=replace(OTHER.matryoshka, layer_weighting=LayerWeighting.linear)
        ),
        last + 0.7 * fifth: CosineMSEConfig(matryoshka=MatryoshkaConfig(layers=[5], layer_weights=[0.7])),
        4 * last + second: CombinedConfig(losses=parts),
        4 * last + 4 * fifth: CombinedConfig(
            losses=[parts[0], CosineMSEConfig()], matryoshka=MatryoshkaConfig(layers=[5])
        ),
    }
    drawn = replace(OTHER, matryoshka=replace(OTHER.matryoshka, layers_per_step=1))
    *actual, of_drawn = ranks(1, of_layers, [*cases.values(), drawn])[0]
    assert [each["loss"] for each in actual] == pytest.approx(list(cases))
    assert actual[1]["loss@layer5"] == pytest.approx(fifth)
    assert actual[1]["loss@last"] == pytest.approx(last)
    (layer,) = [name for name in of_drawn if name.startswith("loss@layer")]
    assert of_drawn["loss"] == pytest.approx(last + {"loss@layer2": second, "loss@layer5": fifth}[layer])


def test_draws_are_functions_of_seed_and_batch():
    counts = Counter[int]()
    for batch in range(900):
        drawn = draw(3, 2, 7, batch, Drawn.dims)
        assert drawn == sorted(set(drawn)) == draw(3, 2, 7, batch, Drawn.dims)
        counts.update(drawn)
    assert all(abs(count - 600) < 60 for count in counts.values())
    assert [draw(9, 3, 7, batch, Drawn.dims) for batch in range(9)] != [
        draw(9, 3, 8, batch, Drawn.dims) for batch in range(9)
    ]
    assert draw(3, 5, 7, 0, Drawn.dims) == [0, 1, 2]
