"""Losses of scored pairs equal their formulas on any number of ranks, and sentence-transformers' classes."""

from dataclasses import replace

import pytest
import torch
from sentence_transformers import losses
from sentence_transformers.sentence_transformer.losses.contrastive import SiameseDistanceMetric
from torch import Tensor, nn

from embedtrain.config.losses import (
    AnglEConfig,
    ContrastiveConfig,
    CoSENTConfig,
    CosineMSEConfig,
    Distance,
    LossConfig,
    OnlineContrastiveConfig,
    Reduction,
)
from tests.losses.global_batch import GlobalVectors, check, run, vectors
from tests.losses.reference_loss import assert_equals_reference
from tests.marks import slow_but

SIZES = (1, 3, 2, 1, 4, 2)
SIAMESE = {
    Distance.cosine: SiameseDistanceMetric.COSINE_DISTANCE,
    Distance.euclidean: SiameseDistanceMetric.EUCLIDEAN,
    Distance.manhattan: SiameseDistanceMetric.MANHATTAN,
}


def scored(sizes: tuple[int, ...] = SIZES, *, levels: int = 0, dimension: int = 8) -> GlobalVectors:
    """Pairs with random scores, or with `levels` different scores from 0 to 1; vectors not of length 1."""
    batch = vectors(sizes, scores=True, normalised=False, dimension=dimension)
    if levels:
        return replace(batch, scores=(batch.scores * levels).floor() / (levels - 1))
    return replace(batch, scores=batch.scores.float().double())


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Of complex vectors, as in the paper: |Re + Im| of the sum of a conj(b)."""
    half = len(a) // 2
    left, right = torch.complex(a[:half], a[half:]), torch.complex(b[:half], b[half:])
    product = (left * right.conj()).sum() / (a.norm() * b.norm())
    return (product.real + product.imag).abs()


def distance_of(a: Tensor, b: Tensor, distance: Distance) -> Tensor:
    match distance:
        case Distance.cosine:
            return 1 - cosine(a, b)
        case Distance.euclidean:
            return (a - b).square().sum().sqrt()
        case Distance.manhattan:
            return (a - b).abs().sum()


def pairs(batch: GlobalVectors) -> list[tuple[Tensor, Tensor, float]]:
    return [
        (batch.queries[row], batch.documents[index], batch.scores[index].item())
        for row in range(len(batch.sizes))
        for index in batch.documents_of(row)
    ]


def ordered(config: CoSENTConfig | AnglEConfig):
    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        similar = cosine if isinstance(config, CoSENTConfig) else angle
        actual = [(similar(a, b) / config.temperature, score) for a, b, score in pairs(batch)]
        gaps = [lower - higher for lower, small in actual for higher, large in actual if small < large]
        return torch.log(1 + sum((gap.exp() for gap in gaps), batch.queries.sum() * 0))

    return textbook


@pytest.mark.parametrize("levels", [0, 3], ids=["scores", "equal scores"])
@pytest.mark.parametrize("config", [CoSENTConfig(), AnglEConfig(temperature=0.1)], ids=lambda c: c.name)
def test_ordered_pairs(ranks, config, levels):
    check(ranks, config, scored(levels=levels), ordered(config), only=[0, 2, 4, 7])


@pytest.mark.parametrize("config", [CoSENTConfig(), AnglEConfig()], ids=lambda c: c.name)
def test_no_ordered_pairs(ranks, config):
    """Equal scores, one pair, or pairs of one row: loss and gradient are 0."""
    check(ranks, config, replace(scored(), scores=torch.ones(sum(SIZES), dtype=torch.float64)), ordered(config))
    check(ranks, config, scored((1,)), ordered(config), only=[0, 1, 5])


def test_one_row(ranks):
    check(ranks, CoSENTConfig(), scored((5,)), ordered(CoSENTConfig()), only=[0, 2, 5])


@pytest.mark.parametrize("dimension", [8, 7])
@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize(("config", "theirs"), [(CoSENTConfig(), losses.CoSENTLoss), (AnglEConfig(), losses.AnglELoss)])
def test_ordered_pairs_equals_sentence_transformers(ranks, config, theirs, levels, dimension):
    batch = scored((2,) * 6, levels=levels, dimension=dimension)
    assert_equals_reference(ranks, config, batch, theirs, batch.scores, as_pairs=True)


def test_many_ordered_pairs(ranks):
    """Cosines in the reverse order of the scores at a temperature of 0.01: terms up to exp(200) do not overflow."""
    batch = scored((1,) * 40)
    actual = torch.stack([cosine(a, b) for a, b, _ in pairs(batch)])
    batch = replace(batch, scores=-actual.float().double())
    config = CoSENTConfig(temperature=0.01)
    # A float32 cosine is off by 6e-8, and by 6e-6 over the temperature; so are the terms.
    check(ranks, config, batch, ordered(config), fp32=5e-5, only=[0, 2, 7])


class DoubleMSE(nn.MSELoss):
    """Up to torch 2.12, the backward pass of MSELoss requires that both arguments have the same type."""

    def forward(self, values: Tensor, labels: Tensor) -> Tensor:
        return super().forward(values, labels.to(values.dtype))


def test_cosine_mse(ranks):
    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        terms = [(cosine(a, b) - score) ** 2 for a, b, score in pairs(batch)]
        return sum(terms) / len(terms)

    check(ranks, CosineMSEConfig(), scored(), textbook)
    batch = scored((2,) * 5)
    # CosineSimilarityLoss converts labels to float32.
    assert_equals_reference(
        ranks,
        CosineMSEConfig(),
        batch,
        losses.CosineSimilarityLoss,
        batch.scores,
        as_pairs=True,
        tolerance=1e-6,
        loss_fct=DoubleMSE(),
    )


@pytest.mark.parametrize("distance", slow_but([Distance.cosine, Distance.euclidean], Distance))
@pytest.mark.parametrize("levels", [0, 2], ids=["scores", "labels"])
def test_contrastive(ranks, distance, levels):
    margin = {Distance.cosine: 0.9, Distance.euclidean: 3.5, Distance.manhattan: 9.0}[distance]

    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        terms = []
        for a, b, score in pairs(batch):
            d = distance_of(a, b, distance)
            terms.append((score * d**2 + (1 - score) * (margin - d).clamp(min=0) ** 2) / 2)
        return sum(terms) / len(terms)

    config = ContrastiveConfig(margin=margin, distance=distance)
    check(ranks, config, scored(levels=levels), textbook, only=[0, 2, 5, 7])
    batch = scored((2,) * 5, levels=levels)
    # torch's pairwise_distance, which they use, adds 1e-6 to each difference.
    assert_equals_reference(
        ranks,
        config,
        batch,
        losses.ContrastiveLoss,
        batch.scores,
        as_pairs=True,
        tolerance=2e-5,
        margin=margin,
        distance_metric=SIAMESE[distance],
    )


def hard_pairs(config: OnlineContrastiveConfig):
    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        actual = [(distance_of(a, b, config.distance or Distance.cosine), score) for a, b, score in pairs(batch)]
        good, bad = [d for d, score in actual if score == 1], [d for d, score in actual if score == 0]
        zero = batch.queries.sum() * 0
        farthest = max(good) if good else sum(bad) / max(1, len(bad))
        nearest = min(bad) if bad else sum(good) / max(1, len(good))
        total = sum((d**2 for d in good if d > nearest), zero)
        total = total + sum(((config.margin - d).clamp(min=0) ** 2 for d in bad if d < farthest), zero)
        return total if config.reduction is Reduction.sum else total / len(actual)

    return textbook


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize("distance", slow_but([Distance.cosine, Distance.euclidean], Distance))
def test_online_contrastive(ranks, distance, reduction):
    margin = {Distance.cosine: 0.9, Distance.euclidean: 3.5, Distance.manhattan: 9.0}[distance]
    config = OnlineContrastiveConfig(margin=margin, distance=distance, reduction=reduction)
    # With three levels, pairs of score 0.5 are neither positives nor negatives.
    for batch in (scored(levels=2), scored(levels=3)):
        check(ranks, config, batch, hard_pairs(config), only=[0, 2, 7])
    if reduction is Reduction.sum:
        batch = scored((2,) * 6, levels=2)
        assert_equals_reference(
            ranks,
            config,
            batch,
            losses.OnlineContrastiveLoss,
            batch.scores,
            as_pairs=True,
            tolerance=2e-5,
            margin=margin,
            distance_metric=SIAMESE[distance],
        )


@pytest.mark.parametrize("score", [0.0, 1.0, 0.5], ids=["negatives only", "positives only", "neither"])
def test_online_contrastive_with_only_positives_or_negatives(ranks, score):
    batch = replace(scored(), scores=torch.full((sum(SIZES),), score, dtype=torch.float64))
    config = OnlineContrastiveConfig(margin=1.0)
    check(ranks, config, batch, hard_pairs(config), only=[0, 2, 5])


def test_hard_pairs(ranks):
    batch = replace(
        vectors((1, 1, 1, 1)),
        queries=torch.eye(2, dtype=torch.float64)[[0, 0, 0, 0]],
        documents=torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64),
        scores=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64),
    )
    # Distances 0, 1 of positives and 0.3, 2 of negatives: the second and the third pair are hard.
    answers = ranks(2, run, OnlineContrastiveConfig(), batch, [[0, 1, 2], [3]], torch.float64, 2)
    assert sum(answer["metrics"]["hard_pairs"] for answer in answers) == 0.5


@pytest.mark.parametrize(
    "config",
    [
        *(kind(distance=d) for d in Distance for kind in (ContrastiveConfig, OnlineContrastiveConfig)),
        *(CoSENTConfig(), AnglEConfig(), CosineMSEConfig()),
    ],
    ids=lambda c: f"{c.name}-{getattr(c, 'distance', None)}",
)
def test_equal_vectors_have_finite_gradients(ranks, config: LossConfig):
    batch = scored(levels=2)
    batch = replace(
        batch, queries=batch.queries[:1].expand(6, 8), documents=batch.queries[:1].expand(sum(SIZES), 8).contiguous()
    )
    for answer in ranks(2, run, config, batch, [[0, 1, 2], [3, 4, 5]], torch.float32, 8):
        assert answer["queries"].isfinite().all()
        assert answer["documents"].isfinite().all()
