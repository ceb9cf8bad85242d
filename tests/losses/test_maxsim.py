"""Losses of late interaction equal their formulas: values, gradients, all implementations, any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.config.losses import (
    CombinedConfig,
    CustomConfig,
    DistillScoresConfig,
    Hardness,
    Implementation,
    InfoNCEConfig,
    MarginMSEConfig,
    MatryoshkaConfig,
    XTRConfig,
)
from embedtrain.errors import ConfigError
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.build import build_loss
from embedtrain.losses.encoded import Part
from embedtrain.losses.score import VectorScore
from tests.losses.token_vectors import GUIDE, TokenCase, check_tokens, token_batch

IMPLEMENTATIONS = (Implementation.plain, Implementation.tiled, Implementation.ring)
OPTIONS = (
    {},
    {"mask_duplicates": False, "margin": 0.1},
    {"false_negative_margin": 0.2},
    {"hardness": Hardness.all, "hardness_strength": 2.0},
    {"hardness": Hardness.hard, "hardness_strength": 2.0},
    {"guide": GUIDE},
    {"matryoshka": MatryoshkaConfig(dims=[6, 3, 2], dim_weights=[1.0, 0.5, 0.25])},
)


def infonce(**options):
    return InfoNCEConfig(temperature=0.7, learn_temperature=True, **options)


@pytest.mark.quick("ring", "plain")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_infonce(ranks, implementation):
    cases = [
        TokenCase(infonce(implementation=implementation, **options), mean=n % 2 > 0)
        for n, options in enumerate(OPTIONS)
    ]
    cases += [TokenCase(infonce(implementation=implementation), mean=True)]
    check_tokens(ranks, cases, token_batch())


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ("aten::mm", "aten::addmm_", "aten::bmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "products"), [("meta", 4), ("cpu", 6)])
def test_pages_are_compared_in_blocks_of_the_device(device, products):
    """Pages of 1,000 rows with 8,192 rows of queries: a product for each would be small on a GPU."""
    number, rows = (16, 1000) if device == "meta" else (3, 1000)
    queries, pages = (
        Part(torch.ones(count * size, 2, device=device, requires_grad=True), np.full(count, size))
        for count, size in ((256, 32), (number, rows))
    )
    score = MaxSim(mean=False)
    with Products() as counted:
        scores = score.tile(queries, score.columns(pages)).scores(torch.ones(1, device=device))
        scores.sum().backward()
    assert scores.shape == (256, number)
    assert counted.count == products, "of the scores, and of the gradient of the pages"


def test_infonce_of_own_negatives(ranks):
    cases = [TokenCase(infonce(in_batch_negatives=False, **options), mean=True) for options in OPTIONS]
    check_tokens(ranks, cases, token_batch())


def test_tiles_of_any_size(ranks):
    cases = [TokenCase(infonce(implementation=implementation)) for implementation in IMPLEMENTATIONS[1:]]
    cases += [TokenCase(XTRConfig(top_k=4, implementation=implementation)) for implementation in IMPLEMENTATIONS[1:]]
    for cells in (1, 40):
        check_tokens(ranks, cases, token_batch(), only=[0], cells=cells)


def test_float32(ranks):
    configs = [infonce(implementation=Implementation.plain), infonce(implementation=Implementation.tiled)]
    configs += [XTRConfig(top_k=4), XTRConfig(top_k=4, implementation=Implementation.ring)]
    cases = [TokenCase(config, mean=True) for config in configs]
    check_tokens(ranks, cases, token_batch(), only=[1], dtype=torch.float32, tolerance=1e-5)


def test_default_temperatures(ranks):
    cases = [TokenCase(kind(), mean) for kind in (InfoNCEConfig, DistillScoresConfig) for mean in (False, True)]
    assert [MaxSim(mean=mean).default_temperature for mean in (False, True)] == [1.0, 0.05]
    check_tokens(ranks, cases, token_batch(), only=[0])


def test_bounds_of_the_temperature():
    """Sums over tokens have wider bounds than similarities of vectors."""
    for score, highest in ((MaxSim(mean=False), 32.0), (MaxSim(mean=True), 32.0), (VectorScore("cosine"), 1.0)):
        loss = build_loss(InfoNCEConfig(learn_temperature=True), dimension=2, seed=0, score=score)
        with torch.no_grad():
            loss.temperature.log_scale.fill_(-50.0)
        assert 1 / loss.temperature.scale(torch.zeros(1)).item() == pytest.approx(highest)
    bounds = InfoNCEConfig(learn_temperature=True, temperature_bounds=[0.1, 2.0])
    with pytest.raises(ConfigError, match=r"loss\.temperature=0\.05: .*\[0\.1,2\.0\]"):
        build_loss(bounds, dimension=2, seed=0, score=MaxSim(mean=True))


def test_distillation(ranks):
    """KL, with and without normalised scores, margins, and KL beside InfoNCE as ColBERTv2 has it."""
    distill = DistillScoresConfig(temperature=0.7)
    cases = [
        TokenCase(distill, mean=True),
        TokenCase(replace(distill, normalize_scores=True)),
        TokenCase(DistillScoresConfig(temperature=1.0, teacher_temperature=2.0, normalize_scores=True), mean=True),
        TokenCase(MarginMSEConfig()),
        TokenCase(CombinedConfig(losses=[InfoNCEConfig(temperature=1.0), replace(distill, weight=0.5)])),
    ]
    check_tokens(ranks, cases, token_batch())


@pytest.mark.quick("1", "4")
@pytest.mark.parametrize("top_k", [1, 4, 1000])
def test_xtr(ranks, top_k):
    """The tokens of all ranks' documents are retrieved; with more than there are, it is MeanMaxSim."""
    trained = XTRConfig(top_k=top_k, temperature=0.7, learn_temperature=True)
    options = ({}, {"mask_duplicates": False}, {"matryoshka": MatryoshkaConfig(dims=[6, 2])})
    cases = [
        TokenCase(replace(trained, implementation=implementation, **given), mean=True)
        for given in options
        for implementation in IMPLEMENTATIONS
    ]
    check_tokens(ranks, cases, token_batch())


def test_one_row_and_no_negatives(ranks):
    for documents, rows in (((1,), (3,)), ((2, 1), (2, 4, 1))):
        xtr = XTRConfig(top_k=2, temperature=0.5)
        configs = infonce(), xtr, replace(xtr, implementation=Implementation.ring)
        cases = [TokenCase(config) for config in configs]
        check_tokens(ranks, cases, token_batch(documents, (3, 1)[: len(documents)], rows), only=[0, 2])


def test_a_custom_loss_of_vectors_is_rejected(monkeypatch, tmp_path):
    (tmp_path / "own_losses.py").write_text(
        "from embedtrain.losses.types import EncodedLoss, Loss\n"
        "class OfVectors(Loss):\n    forward = None\n"
        "class OfScores(EncodedLoss):\n"
        "    forward = None\n"
        "    def __init__(self, score):\n        super().__init__()\n        self.score = score\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    score = MaxSim(mean=False)
    with pytest.raises(ConfigError, match=r"loss\.path=own_losses:OfVectors: .*late_interaction"):
        build_loss(CustomConfig(path="own_losses:OfVectors"), dimension=2, seed=0, score=score)
    assert build_loss(CustomConfig(path="own_losses:OfScores"), dimension=2, seed=0, score=score).score is score


def test_scores_of_ragged_queries_are_means_over_their_own_rows():
    """A query alone, beside longer ones, and with all of its rows twice has the same MeanMaxSim."""
    generator = torch.Generator().manual_seed(5)
    score, sizes = MaxSim(mean=True), np.array([1, 5, 3])
    queries = Part(torch.randn(9, 4, generator=generator, dtype=torch.float64), sizes)
    documents = Part(torch.randn(12, 4, generator=generator, dtype=torch.float64), np.array([2, 7, 3]))
    expected = torch.stack(
        [
            torch.stack([(query @ document.T).amax(dim=1).mean() for document in documents.values.split([2, 7, 3])])
            for query in queries.values.split(sizes.tolist())
        ]
    )
    owners = torch.arange(3)
    doubled = queries.take(torch.arange(3), np.arange(3))
    doubled = Part(torch.cat([rows.repeat(2, 1) for rows in doubled.values.split(sizes.tolist())]), 2 * sizes)
    for texts in (queries, doubled):
        pairs = score.compare(texts, documents, owners, np.ones(3, dtype=np.int64))
        torch.testing.assert_close(pairs, expected.diagonal())
        columns = score.columns(documents)
        tile = score.tile(texts, columns).scores(torch.ones(3, 1, dtype=torch.float64))
        torch.testing.assert_close(tile.sort(dim=1).values, expected.sort(dim=1).values)
        for number in range(3):
            alone = score.tile(texts.slice(number, number + 1), columns).scores(torch.ones(1, 1, dtype=torch.float64))
            torch.testing.assert_close(alone, tile[number : number + 1])
