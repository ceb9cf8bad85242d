"""Triplet losses equal their formulas on any number of ranks, and sentence-transformers' classes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from sentence_transformers import losses
from sentence_transformers.sentence_transformer.losses.batch_hard_triplet import BatchHardTripletLossDistanceFunction
from sentence_transformers.sentence_transformer.losses.triplet import TripletDistanceMetric
from torch import Tensor
from torch.nn.functional import softplus

from embedtrain.config.losses import BatchTripletConfig, Distance, LossConfig, TripletConfig, TripletMining
from tests.losses.global_batch import GlobalVectors, check, run, run_in_chunks, run_under_autocast, vectors
from tests.losses.reference_loss import assert_equals_reference
from tests.marks import slow_but

MARGIN = {Distance.cosine: 0.3, Distance.euclidean: 0.8, Distance.manhattan: 2.0}
ALL_PAIRS = {
    Distance.cosine: BatchHardTripletLossDistanceFunction.cosine_distance,
    Distance.euclidean: BatchHardTripletLossDistanceFunction.euclidean_distance,
    Distance.manhattan: lambda rows: torch.cdist(rows, rows, p=1.0),
}
THEIRS = {
    TripletMining.all: losses.BatchAllTripletLoss,
    TripletMining.hard: losses.BatchHardTripletLoss,
    TripletMining.hard_soft_margin: losses.BatchHardSoftMarginTripletLoss,
    TripletMining.semi_hard: losses.BatchSemiHardTripletLoss,
}


def distance_of(a: Tensor, b: Tensor, distance: Distance) -> Tensor:
    match distance:
        case Distance.cosine:
            return 1 - (a * b).sum() / (a.norm() * b.norm())
        case Distance.euclidean:
            return (a - b).square().sum().sqrt()
        case Distance.manhattan:
            return (a - b).abs().sum()


def triplets(batch: GlobalVectors, config: TripletConfig) -> list[tuple[Tensor, Tensor]]:
    """Distances of the positive and the negative of every triplet of a row."""
    actual = []
    for row in range(len(batch.sizes)):
        positive, *negatives = [
            distance_of(batch.queries[row], batch.documents[index], config.distance or Distance.cosine)
            for index in batch.documents_of(row)
        ]
        actual += [(positive, negative) for negative in negatives]
    return actual


@pytest.mark.parametrize("distance", slow_but([Distance.cosine, Distance.euclidean], Distance))
@pytest.mark.parametrize("sizes", [(2, 3, 1, 5, 2), (4,), (1, 1, 1)], ids=["uneven", "one row", "no negatives"])
def test_triplet(ranks, distance, sizes):
    config = TripletConfig(margin=MARGIN[distance], distance=distance)

    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        terms = [(near - far + config.margin).clamp(min=0) for near, far in triplets(batch, config)]
        return sum(terms, batch.queries.sum() * 0) / max(1, len(terms))

    batch = vectors(sizes, normalised=False)
    check(ranks, config, batch, textbook, only=[0, 2, 4, 7])
    actual = triplets(batch, config)
    answers = ranks(2, run, config, batch, [[0], list(range(1, len(sizes)))], torch.float64, 8)
    accuracy = sum(answer["metrics"]["accuracy"] for answer in answers)
    assert accuracy == pytest.approx(sum(bool(far > near) for near, far in actual) / max(1, len(actual)))


@pytest.mark.parametrize(
    ("distance", "metric"),
    [
        (Distance.cosine, TripletDistanceMetric.COSINE),
        (Distance.euclidean, TripletDistanceMetric.EUCLIDEAN),
        (Distance.manhattan, TripletDistanceMetric.MANHATTAN),
    ],
)
def test_triplet_equals_sentence_transformers(ranks, distance, metric):
    config = TripletConfig(margin=MARGIN[distance], distance=distance)
    batch = vectors((2,) * 6, normalised=False)
    arguments = {"distance_metric": metric, "triplet_margin": config.margin}
    assert_equals_reference(ranks, config, batch, losses.TripletLoss, torch.empty(0), **arguments)


def texts(labels: list[int], *, normalised: bool = False) -> GlobalVectors:
    """Rows of one text and a class each."""
    return replace(vectors((0,) * len(labels), normalised=normalised), labels=torch.tensor(labels))


def mined(config: BatchTripletConfig):
    """The formula in the docstring of BatchTriplet, anchor by anchor."""

    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        terms = []
        labels = batch.labels.tolist()
        for anchor, label in enumerate(labels):
            d = {
                o: distance_of(batch.queries[anchor], batch.queries[o], config.distance or Distance.cosine)
                for o in range(len(labels))
            }
            near = [d[o] for o in d if labels[o] == label and o != anchor]
            far = [d[o] for o in d if labels[o] != label]
            if near and far:
                terms += list(terms_of(config, near, far))
        return sum(terms, batch.queries.sum() * 0) / max(1, len(terms))

    return textbook


def terms_of(config: BatchTripletConfig, near: list[Tensor], far: list[Tensor]) -> list[Tensor]:
    match config.mining:
        case TripletMining.all:
            return [p - n + config.margin for p, n in product(near, far) if p - n + config.margin > 0]
        case TripletMining.hard:
            return [(max(near) - min(far) + config.margin).clamp(min=0)]
        case TripletMining.hard_soft_margin:
            return [softplus(max(near) - min(far))]
        case TripletMining.semi_hard:
            chosen = [min([n for n in far if n > p], default=max(far)) for p in near]
            return [(p - n + config.margin).clamp(min=0) for p, n in zip(near, chosen, strict=True)]


# Class 7 has one row, so that row is no anchor, but everybody's negative.
CLASSES = [0, 1, 0, 2, 1, 0, 7, 2, 0, 1]


@pytest.mark.quick("hard-cosine", "hard_soft_margin-euclidean", "semi_hard-cosine", "all-euclidean")
@pytest.mark.parametrize("distance", slow_but([Distance.cosine, Distance.euclidean], Distance))
@pytest.mark.parametrize("mining", TripletMining)
def test_batch_triplet(ranks, mining, distance):
    config = BatchTripletConfig(mining=mining, distance=distance, margin=MARGIN[distance])
    check(ranks, config, texts(CLASSES), mined(config), only=[0, 2, 5, 7])


def test_anchors_with_a_hundred_negatives(ranks):
    """More than fit in a block of running sums."""
    config = BatchTripletConfig(mining=TripletMining.all, margin=MARGIN[Distance.euclidean])
    check(ranks, config, texts([0, 0, 0, *range(1, 101)]), mined(config), only=[0, 2])


@pytest.mark.parametrize("mining", TripletMining)
@pytest.mark.parametrize("labels", [[0] * 5, [0, 1, 2, 3], [0]], ids=["one class", "a class each", "one row"])
def test_no_triplet(ranks, mining, labels):
    """Every anchor lacks a positive or a negative: loss and gradient are 0."""
    config = BatchTripletConfig(mining=mining)
    check(ranks, config, texts(labels), mined(config), only=[0, 2, 5])


@pytest.mark.parametrize("mining", [TripletMining.all, TripletMining.hard, TripletMining.semi_hard])
def test_no_margin_is_violated(ranks, mining):
    rows = torch.eye(8, dtype=torch.float64)[[0, 0, 1, 1]] + 0.01 * torch.randn(4, 8, dtype=torch.float64)
    config = BatchTripletConfig(mining=mining, distance=Distance.euclidean, margin=0.1)
    batch = replace(texts([0, 0, 1, 1]), queries=rows)
    check(ranks, config, batch, mined(config), only=[0, 1, 5])


@pytest.mark.parametrize("distance", Distance)
@pytest.mark.parametrize("mining", TripletMining)
def test_batch_triplet_equals_sentence_transformers(ranks, mining, distance):
    config = BatchTripletConfig(mining=mining, distance=distance, margin=MARGIN[distance])
    batch = texts([0, 1, 0, 2, 1, 0, 2, 2, 0, 1])
    arguments = {"distance_metric": ALL_PAIRS[distance]}
    if mining is not TripletMining.hard_soft_margin:
        arguments["margin"] = config.margin
    assert_equals_reference(ranks, config, batch, THEIRS[mining], batch.labels, **arguments)


@pytest.mark.parametrize("distance", Distance)
@pytest.mark.parametrize("mining", TripletMining)
def test_equal_vectors_have_finite_gradients(ranks, mining, distance):
    batch = texts(CLASSES)
    batch = replace(batch, queries=batch.queries[[0, 0, 0, 1, 1, 1, 2, 2, 2, 2]])
    config: LossConfig = BatchTripletConfig(mining=mining, distance=distance)
    for answer in ranks(2, run, config, batch, [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], torch.float32, 8):
        assert answer["queries"].isfinite().all()
        assert answer["queries"].abs().sum() > 0


def test_equal_vectors_of_a_row(ranks):
    batch = vectors((2, 2))
    batch = replace(batch, documents=batch.queries.repeat_interleave(2, dim=0))
    for distance in Distance:
        (answer,) = ranks(1, run, TripletConfig(distance=distance), batch, [[0, 1]], torch.float32, 8)
        assert answer["queries"].isfinite().all()
        assert answer["local_loss"] == pytest.approx(0.3)


@pytest.mark.parametrize("mining", TripletMining)
def test_chunks(ranks, mining):
    for answer in ranks(2, run_in_chunks, BatchTripletConfig(mining=mining), texts(CLASSES), [[0, 1, 2, 3, 4], []]):
        single, chunked = answer
        assert chunked["local_loss"] == pytest.approx(single["local_loss"], rel=1e-12)
        torch.testing.assert_close(chunked["queries"], single["queries"], rtol=1e-10, atol=1e-14)


def test_active_triplets(ranks):
    """Distances of points on a line: anchors at 0 and 1 of one class, a negative at 3."""
    rows = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    batch = replace(texts([0, 0, 1]), queries=rows, documents=torch.empty(0, 1, dtype=torch.float64))
    # d(positive) - d(negative) is 1 - 3 and 1 - 2.
    for margin, active in ((0.5, 0.0), (1.5, 0.5), (2.5, 1.0)):
        for mining in (TripletMining.all, TripletMining.hard, TripletMining.semi_hard):
            config = BatchTripletConfig(mining=mining, distance=Distance.euclidean, margin=margin)
            answers = ranks(2, run, config, batch, [[0, 1], [2]], torch.float64, 1)
            assert sum(answer["metrics"]["active"] for answer in answers) == active


def test_autocast_has_no_effect(ranks):
    ((inside, outside),) = ranks(1, run_under_autocast, BatchTripletConfig(), texts(CLASSES))
    assert inside == outside
