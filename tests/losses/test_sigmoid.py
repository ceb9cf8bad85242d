"""SigLIP against its formula in float64, on any number of ranks: masks, trained temperature and bias, chunks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import LossConfig, SigLIPConfig, Similarity
from embedtrain.distributed.world import World
from embedtrain.losses import similarity
from embedtrain.losses.build import build_loss
from tests.losses.global_batch import GlobalVectors, check, run, vectors

SIZES = (1, 3, 2, 1, 4, 2)


def left_out(batch: GlobalVectors, row: int) -> set[int]:
    """Documents equal, by text or id, to the positive of this row's query or of an equal one; but for its own."""
    positives = [batch.documents_of(other)[0] for other in range(len(batch.sizes))]
    answers = [p for other, p in enumerate(positives) if batch.query_keys[other] == batch.query_keys[row]]
    found = set()
    for keys in (batch.document_keys, batch.document_ids):
        if keys is not None:
            found |= {place for place, key in enumerate(keys) if any(key == keys[answer] for answer in answers)}
    return found - {positives[row]}


def sigmoids(config: SigLIPConfig):
    def textbook(batch: GlobalVectors, parameters: dict[str, Tensor]) -> Tensor:
        queries, documents = batch.queries, batch.documents
        if config.similarity is Similarity.cosine:
            queries = queries / queries.norm(dim=1, keepdim=True)
            documents = documents / documents.norm(dim=1, keepdim=True)
        temperature = config.temperature
        if config.learn_temperature:
            # What is out of bounds is put back before the loss is computed, so the gradient is that at the bound.
            log, (low, high) = -parameters["temperature.log_scale"], config.temperature_bounds
            temperature = (log + (log.clamp(math.log(low), math.log(high)) - log).detach()).exp()
        bias = parameters["bias"] if config.learn_bias else config.bias
        total = 0.0 * queries.sum()
        for row in range(len(batch.sizes)):
            skipped = left_out(batch, row) if config.mask_duplicates else set()
            for place in range(len(documents)):
                if place not in skipped:
                    sign = 1 if place == batch.documents_of(row)[0] else -1
                    logit = sign * (queries[row] @ documents[place] / temperature + bias)
                    total = total - torch.log(1 / (1 + (-logit).exp())).sum()
        return total / len(batch.sizes)

    return textbook


CONFIGS = {
    "defaults": SigLIPConfig(),
    "dot": SigLIPConfig(similarity=Similarity.dot, temperature=0.5, bias=-1.0),
    "fixed": SigLIPConfig(learn_temperature=False, learn_bias=False, temperature=0.3, bias=-2.0),
    "fixed bias": SigLIPConfig(learn_bias=False, bias=0.0),
    "out of bounds": SigLIPConfig(temperature=0.1, temperature_bounds=[0.2, 0.5], bias=-3.0),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_value_and_gradient(ranks, config):
    check(ranks, config, vectors(SIZES, normalised=False), sigmoids(config))


def with_duplicates(*, ids: bool) -> GlobalVectors:
    """Equal queries; a positive that is another's positive, and another's hard negative, and its own row's."""
    batch = vectors(SIZES, normalised=False)
    #       row 0, 1        , 2     , 3 , 4             , 5
    keys = [10, 20, 21, 10, 30, 10, 40, 50, 30, 51, 50, 60, 21]
    batch = replace(batch, query_keys=torch.tensor([1, 2, 1, 3, 4, 2]), document_keys=torch.tensor(keys))
    return replace(batch, document_ids=torch.arange(13) % 6) if ids else batch


@pytest.mark.parametrize("ids", [False, True], ids=["texts", "ids"])
@pytest.mark.parametrize("mask", [False, True], ids=["kept", "masked"])
def test_duplicates(ranks, mask, ids):
    batch, config = with_duplicates(ids=ids), SigLIPConfig(mask_duplicates=mask, bias=-1.0)
    assert any(left_out(batch, row) for row in range(6))
    check(ranks, config, batch, sigmoids(config), only=[0, 2, 5, 7])


@pytest.mark.parametrize("sizes", [(1,), (3,)])
def test_one_row(ranks, sizes):
    check(ranks, SigLIPConfig(), vectors(sizes), sigmoids(SigLIPConfig()), only=[0, 1, 5])


def test_all_rows_equal(ranks):
    """Every other document is left out: the positives' terms remain."""
    batch = vectors((2, 2, 2))
    batch = replace(batch, query_keys=torch.ones(3), document_keys=torch.ones(6))
    batch = replace(batch, query_keys=batch.query_keys.long(), document_keys=batch.document_keys.long())
    check(ranks, SigLIPConfig(), batch, sigmoids(SigLIPConfig()), only=[0, 2, 5])


def test_extreme_logits(ranks):
    """Logits of hundreds: the loss is their size, not infinite, and gradients are finite."""
    config = SigLIPConfig(temperature=0.01, learn_temperature=False, similarity=Similarity.dot, bias=0.0)
    batch = vectors(SIZES, normalised=False)
    for answer in ranks(2, run, config, batch, [[0, 1, 2], [3, 4, 5]], torch.float32, 8):
        assert math.isfinite(answer["local_loss"])
        assert answer["queries"].isfinite().all()


def out_of_bounds(world: World, batch: GlobalVectors) -> tuple[float, float, float]:
    config = SigLIPConfig(temperature_bounds=[0.05, 0.5])
    loss = build_loss(config, dimension=8, seed=0)
    rows = list(range(world.rank, len(batch.sizes), world.size))
    found = []
    for log_scale in (20.0, -20.0):
        with torch.no_grad():
            loss.temperature.log_scale.fill_(log_scale)
        output = loss(*batch.of_rank(rows, torch.float32))
        found.append(sum(world.gather(output.metrics["temperature"].item())))
    return *found, sum(world.gather(output.metrics["bias"].item()))


def test_the_temperature_stays_within_its_bounds(ranks):
    for lowest, highest, bias in ranks(3, out_of_bounds, vectors(SIZES)):
        assert lowest == pytest.approx(0.05)
        assert highest == pytest.approx(0.5)
        assert bias == pytest.approx(-10.0)


def test_what_is_trained():
    def names(config: SigLIPConfig) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in build_loss(config, dimension=8, seed=0).named_parameters()}

    assert names(SigLIPConfig()) == {"temperature.log_scale": (1,), "bias": (1,)}
    assert names(SigLIPConfig(learn_temperature=False)) == {"bias": (1,)}
    assert names(SigLIPConfig(learn_temperature=False, learn_bias=False)) == {}


def test_accuracy_is_told(ranks):
    batch = vectors(SIZES)
    scores = F.normalize(batch.queries) @ F.normalize(batch.documents).T
    right = [int(scores[row].argmax()) == batch.documents_of(row)[0] for row in range(6)]
    answers = ranks(3, run, SigLIPConfig(), batch, [[0, 1], [], [2, 3, 4, 5]], torch.float64, 8)
    assert sum(answer["metrics"]["accuracy"] for answer in answers) == pytest.approx(sum(right) / 6)


def in_small_chunks(world: World, config: LossConfig, batch: GlobalVectors, deal: list[list[int]]) -> list[dict]:
    """With all of a rank's rows in one chunk, and with one row in each."""
    usual = similarity.MAX_CHUNK_BYTES
    try:
        found = []
        for size in (usual, 1):
            similarity.MAX_CHUNK_BYTES = size
            found.append(run(world, config, batch, deal, torch.float64, 8))
        return found
    finally:
        similarity.MAX_CHUNK_BYTES = usual


def test_chunks(ranks):
    for whole, chunked in ranks(2, in_small_chunks, SigLIPConfig(), with_duplicates(ids=True), [[0, 1, 2, 3], [4, 5]]):
        assert chunked["local_loss"] == pytest.approx(whole["local_loss"], rel=1e-12)
        for name in ("queries", "documents"):
            torch.testing.assert_close(chunked[name], whole[name], rtol=1e-10, atol=1e-14)
        for name, grad in whole["parameters"].items():
            torch.testing.assert_close(chunked["parameters"][name], grad, rtol=1e-10, atol=1e-14)


def saved_for_backward(world: World, num_rows: int, chunk_bytes: int) -> int:
    """The most numbers that one tensor kept for the backward pass holds."""
    batch = vectors((1,) * num_rows)
    loss = build_loss(SigLIPConfig(), dimension=8, seed=0)
    queries, documents, batch_info = batch.of_rank(range(num_rows), torch.float32)
    queries.requires_grad_(), documents.requires_grad_()
    sizes = [0]

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    usual = similarity.MAX_CHUNK_BYTES
    similarity.MAX_CHUNK_BYTES = chunk_bytes
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss(queries, documents, batch_info).local_loss.backward()
    finally:
        similarity.MAX_CHUNK_BYTES = usual
    return max(sizes)


def test_no_matrix_of_all_is_kept(ranks):
    """300 x 300 scores, 10 rows at a time: what is kept is the vectors."""
    (most,) = ranks(1, saved_for_backward, 300, 10 * 300 * 4 * 4)
    assert most < 300 * 300 / 10


def under_autocast(world: World, config: LossConfig, batch: GlobalVectors) -> list[float]:
    rows = [list(range(len(batch.sizes)))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(world, config, batch, rows, torch.float32, 8)
    return [inside["local_loss"], run(world, config, batch, rows, torch.float32, 8)["local_loss"]]


def test_autocast_rounds_nothing(ranks):
    ((inside, outside),) = ranks(1, under_autocast, SigLIPConfig(), vectors(SIZES))
    assert inside == outside
