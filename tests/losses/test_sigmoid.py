"""SigLIP equals its formula in float64 on any number of ranks: masks, trained temperature and bias, chunks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import Implementation, SigLIPConfig, Similarity
from embedtrain.distributed.world import World
from embedtrain.losses import similarity
from embedtrain.losses.build import build_loss
from tests.losses.global_batch import GlobalVectors, check, run, run_in_chunks, run_under_autocast, vectors

SIZES = (1, 3, 2, 1, 4, 2)


def excluded(batch: GlobalVectors, row: int) -> set[int]:
    """Documents equal, by text or id, to a positive of this row's query or of an equal one, except its own positive."""
    positives = [batch.documents_of(other)[0] for other in range(len(batch.sizes))]
    answers = [p for other, p in enumerate(positives) if batch.query_keys[other] == batch.query_keys[row]]
    indices = set()
    for keys in (batch.document_keys, batch.document_ids):
        if keys is not None:
            indices |= {index for index, key in enumerate(keys) if any(key == keys[answer] for answer in answers)}
    return indices - {positives[row]}


def sigmoids(config: SigLIPConfig):
    bounds = config.temperature_bounds or [0.01, 1.0]
    fixed_temperature = 0.1 if config.temperature is None else config.temperature
    fixed_bias = -10.0 if config.bias is None else config.bias

    def textbook(batch: GlobalVectors, parameters: dict[str, Tensor]) -> Tensor:
        queries, documents = batch.queries, batch.documents
        if config.similarity is not Similarity.dot:
            queries = queries / queries.norm(dim=1, keepdim=True)
            documents = documents / documents.norm(dim=1, keepdim=True)
        temperature = fixed_temperature
        if config.learn_temperature:
            # A value out of bounds is clamped before the loss is computed, so the gradient is that at the bound.
            log, (low, high) = -parameters["temperature.log_scale"], bounds
            temperature = (log + (log.clamp(math.log(low), math.log(high)) - log).detach()).exp()
        bias = parameters["bias"] if config.learn_bias else fixed_bias
        total = 0.0 * queries.sum()
        for row in range(len(batch.sizes)):
            skipped = excluded(batch, row) if config.mask_duplicates else set()
            for index in range(len(documents)):
                if index not in skipped:
                    sign = 1 if index == batch.documents_of(row)[0] else -1
                    logit = sign * (queries[row] @ documents[index] / temperature + bias)
                    total = total - torch.log(1 / (1 + (-logit).exp())).sum()
        return total / len(batch.sizes)

    return textbook


CONFIGS = {
    "defaults": SigLIPConfig(),
    "dot": SigLIPConfig(similarity=Similarity.dot, temperature=0.5, bias=-1.0),
    "fixed": SigLIPConfig(learn_temperature=False, learn_bias=False, temperature=0.3, bias=-2.0),
    "fixed bias": SigLIPConfig(learn_bias=False, bias=0.0),
    "ring": SigLIPConfig(implementation=Implementation.ring),
    "ring, dot": SigLIPConfig(
        implementation=Implementation.ring, similarity=Similarity.dot, temperature=0.5, bias=-1.0
    ),
    "ring, fixed": SigLIPConfig(
        implementation=Implementation.ring, learn_temperature=False, learn_bias=False, temperature=0.3, bias=-2.0
    ),
    "plain": SigLIPConfig(implementation=Implementation.plain),
    "out of bounds": SigLIPConfig(temperature=0.1, temperature_bounds=[0.2, 0.5], bias=-3.0),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_value_and_gradient(ranks, config):
    check(ranks, config, vectors(SIZES, normalised=False), sigmoids(config), only=[0, 2, 4, 7])


def with_duplicates(*, ids: bool) -> GlobalVectors:
    """Equal queries; positives that are also positives and hard negatives of other rows and of their own row."""
    batch = vectors(SIZES, normalised=False)
    #       row 0, 1        , 2     , 3 , 4             , 5
    keys = [10, 20, 21, 10, 30, 10, 40, 50, 30, 51, 50, 60, 21]
    batch = replace(batch, query_keys=torch.tensor([1, 2, 1, 3, 4, 2]), document_keys=torch.tensor(keys))
    return replace(batch, document_ids=torch.arange(13) % 6) if ids else batch


@pytest.mark.quick("ring-masked-texts", "ring-not masked-ids", "tiled-masked-ids", "tiled-not masked-texts")
@pytest.mark.parametrize("ids", [False, True], ids=["texts", "ids"])
@pytest.mark.parametrize("mask", [False, True], ids=["not masked", "masked"])
@pytest.mark.parametrize("implementation", [Implementation.tiled, Implementation.ring])
def test_duplicates(ranks, mask, ids, implementation):
    batch = with_duplicates(ids=ids)
    config = SigLIPConfig(mask_duplicates=mask, bias=-1.0, implementation=implementation)
    assert any(excluded(batch, row) for row in range(6))
    check(ranks, config, batch, sigmoids(config), only=[0, 2, 5, 7])


@pytest.mark.parametrize("sizes", [(1,), (3,)])
def test_one_row(ranks, sizes):
    check(ranks, SigLIPConfig(), vectors(sizes), sigmoids(SigLIPConfig()), only=[0, 1, 5])


def test_equal_rows(ranks):
    """All negatives are excluded; the terms of the positives remain."""
    batch = vectors((2, 2, 2))
    batch = replace(batch, query_keys=torch.ones(3), document_keys=torch.ones(6))
    batch = replace(batch, query_keys=batch.query_keys.long(), document_keys=batch.document_keys.long())
    check(ranks, SigLIPConfig(), batch, sigmoids(SigLIPConfig()), only=[0, 2, 5])


def test_extreme_logits(ranks):
    """Logits of hundreds: the loss and the gradients are finite."""
    config = SigLIPConfig(temperature=0.01, learn_temperature=False, similarity=Similarity.dot, bias=0.0)
    batch = vectors(SIZES, normalised=False)
    for answer in ranks(2, run, config, batch, [[0, 1, 2], [3, 4, 5]], torch.float32, 8):
        assert math.isfinite(answer["local_loss"])
        assert answer["queries"].isfinite().all()


def out_of_bounds(world: World, batch: GlobalVectors) -> tuple[float, float, float]:
    config = SigLIPConfig(temperature_bounds=[0.05, 0.5])
    loss = build_loss(config, dimension=8, seed=0)
    rows = list(range(world.rank, len(batch.sizes), world.size))
    temperatures = []
    for log_scale in (20.0, -20.0):
        with torch.no_grad():
            loss.temperature.log_scale.fill_(log_scale)
        output = loss(*batch.of_rank(rows, torch.float32))
        temperatures.append(sum(world.gather(output.metrics["temperature"].item())))
    return *temperatures, sum(world.gather(output.metrics["bias"].item()))


def test_temperature_stays_within_its_bounds(ranks):
    for lowest, highest, bias in ranks(3, out_of_bounds, vectors(SIZES)):
        assert lowest == pytest.approx(0.05)
        assert highest == pytest.approx(0.5)
        assert bias == pytest.approx(-10.0)


def test_trained_parameters():
    def names(config: SigLIPConfig) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in build_loss(config, dimension=8, seed=0).named_parameters()}

    assert names(SigLIPConfig()) == {"temperature.log_scale": (1,), "bias": (1,)}
    assert names(SigLIPConfig(learn_temperature=False)) == {"bias": (1,)}
    assert names(SigLIPConfig(learn_temperature=False, learn_bias=False)) == {}


@pytest.mark.parametrize("implementation", [Implementation.tiled, Implementation.ring])
def test_accuracy(ranks, implementation):
    batch = vectors(SIZES)
    scores = F.normalize(batch.queries) @ F.normalize(batch.documents).T
    config = SigLIPConfig(implementation=implementation)
    correct = [int(scores[row].argmax()) == batch.documents_of(row)[0] for row in range(6)]
    answers = ranks(3, run, config, batch, [[0, 1], [], [2, 3, 4, 5]], torch.float64, 8)
    assert sum(answer["metrics"]["accuracy"] for answer in answers) == pytest.approx(sum(correct) / 6)


@pytest.mark.parametrize("implementation", [Implementation.tiled, Implementation.ring])
def test_chunks(ranks, implementation):
    config = SigLIPConfig(implementation=implementation)
    for single, chunked in ranks(2, run_in_chunks, config, with_duplicates(ids=True), [[0, 1, 2, 3], [4, 5]]):
        assert chunked["local_loss"] == pytest.approx(single["local_loss"], rel=1e-12)
        for name in ("queries", "documents"):
            torch.testing.assert_close(chunked[name], single[name], rtol=1e-10, atol=1e-14)
        for name, grad in single["parameters"].items():
            torch.testing.assert_close(chunked["parameters"][name], grad, rtol=1e-10, atol=1e-14)


def saved_for_backward(world: World, num_rows: int, chunk_bytes: int) -> int:
    """The number of elements of the largest tensor saved for the backward pass."""
    batch = vectors((1,) * num_rows)
    loss = build_loss(SigLIPConfig(), dimension=8, seed=0)
    queries, documents, batch_info = batch.of_rank(range(num_rows), torch.float32)
    queries.requires_grad_(), documents.requires_grad_()
    sizes = [0]

    def record(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    default = similarity.MAX_CHUNK_BYTES
    similarity.MAX_CHUNK_BYTES = chunk_bytes
    try:
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            loss(queries, documents, batch_info).local_loss.backward()
    finally:
        similarity.MAX_CHUNK_BYTES = default
    return max(sizes)


def test_no_matrix_of_scores_is_saved(ranks):
    """300 x 300 scores, 10 rows at a time: only the vectors are saved."""
    (largest,) = ranks(1, saved_for_backward, 300, 10 * 300 * 4 * 4)
    assert largest < 300 * 300 / 10


def test_autocast_has_no_effect(ranks):
    ((inside, outside),) = ranks(1, run_under_autocast, SigLIPConfig(), vectors(SIZES))
    assert inside == outside
