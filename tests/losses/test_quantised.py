"""Losses of quantised vectors against a plain computation in one process, and the ranges that they smooth."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.util import quantize_embeddings
from torch import Tensor, nn

from embedtrain.checkpoint.snapshot import checkpointed_weights
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.losses import CombinedConfig, InfoNCEConfig, MatryoshkaConfig, OrthogonalConfig, PrecisionSides
from embedtrain.distributed.world import World
from embedtrain.inference.quantised import QUANTISATION_FILE, read_ranges, write_trained_ranges
from embedtrain.losses.build import build_loss, build_losses
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.quantisation import Quantiser, Ranges, straight_through
from tests.losses.global_batch import GlobalVectors, vectors

TEMPERATURE, BATCHES = 0.3, 10
DIMS, PRECISIONS = {8: 1.0, 4: 0.7}, {"float": 1.0, "int8": 0.5, "binary": 0.2}
COUNTS = [(5,), (2, 3), (3, 0, 2)]


def config(**of_matryoshka: Any) -> InfoNCEConfig:
    return InfoNCEConfig(
        temperature=TEMPERATURE,
        matryoshka=MatryoshkaConfig(
            dims=list(DIMS),
            dim_weights=list(DIMS.values()),
            precisions=list(map(VectorPrecision, reversed(PRECISIONS))),
            precision_weights=list(reversed(PRECISIONS.values())),
            **of_matryoshka,
        ),
    )


def batches() -> list[GlobalVectors]:
    """Each of 5 rows, and of other vectors."""
    return [vectors([2, 1, 3, 2, 1], seed=seed) for seed in range(3)]


def of_rank(world: World, counts: tuple[int, ...], sides: PrecisionSides) -> list[dict[str, Any]]:
    """One loss through consecutive batches, the first of which is batch 3 of 10, in float32."""
    loss = build_loss(config(precision_warmup=0.5, precision_sides=sides), dimension=8, seed=0, num_batches=BATCHES)
    first, results = sum(counts[: world.rank]), []
    for number, batch in enumerate(batches(), 3):
        rows = range(first, first + counts[world.rank])
        queries, documents, info = batch.of_rank(list(rows), torch.float32)
        queries.requires_grad_(), documents.requires_grad_()
        object.__setattr__(info, "origin", info.origin._replace(batch=number))
        output = loss(queries, documents, info)
        output.local_loss.backward()
        results.append(
            {
                "loss": output.local_loss.item(),
                "metrics": {name: value.item() for name, value in output.metrics.items()},
                "grads": (queries.grad, documents.grad),
                "ranges": {name: value.clone() for name, value in loss.state_dict().items()},
            }
        )
    return results


def codes(unit: np.ndarray, precision: str, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """What the codes of float32 vectors stand for."""
    if precision == "binary":
        return np.where(unit > 0, 1.0, -1.0) / np.sqrt(unit.shape[1])
    step = (high - low) / np.float32(255)
    return (low + (np.clip(np.floor((unit - low) / step), 0, 255) + np.float32(0.5)) * step).astype(np.float64)


def textbook(sides: PrecisionSides) -> list[dict[str, Any]]:
    """All rows in one process, in float64 but for the codes."""
    results, ranges = [], dict[int, np.ndarray]()
    for number, batch in enumerate(batches(), 3):
        queries, documents = (values.float().double().requires_grad_() for values in (batch.queries, batch.documents))
        positives = torch.tensor([0, 2, 3, 6, 8])
        total, metrics = torch.zeros((), dtype=torch.float64), {}
        for dim, dim_weight in DIMS.items():
            units = [F.normalize(values[:, :dim], dim=1) for values in (queries, documents)]
            single = [F.normalize(values.detach().float()[:, :dim], dim=1).numpy() for values in (queries, documents)]
            ranged = np.concatenate(single if sides is PrecisionSides.both else single[1:])
            extremes = np.stack([ranged.min(0), ranged.max(0)])
            before = ranges.get(dim, extremes)
            ranges[dim] = before + np.float32(0.01) * (extremes - before)
            sum_of_dim = torch.zeros((), dtype=torch.float64)
            for precision, weight in PRECISIONS.items():
                compared = []
                for index, unit in enumerate(units):
                    if precision == "float" or (index == 0 and sides is PrecisionSides.documents):
                        compared.append(unit)
                        continue
                    value = torch.from_numpy(codes(single[index], precision, *ranges[dim]))
                    compared.append(F.normalize(unit + (value - unit).detach(), dim=1))
                value = F.cross_entropy(compared[0] @ compared[1].T / TEMPERATURE, positives)
                factor = weight if precision == "float" else weight * min(1, number / (0.5 * BATCHES))
                sum_of_dim = sum_of_dim + factor * value
                metrics[f"loss@{dim}-{precision}"] = value.item()
            metrics[f"loss@{dim}"] = sum_of_dim.item()
            total = total + dim_weight * sum_of_dim
        total.backward()
        results.append({"loss": total.item(), "metrics": metrics, "grads": (queries.grad, documents.grad)})
        results[-1]["ranges"] = {dim: torch.from_numpy(values.copy()) for dim, values in ranges.items()}
    return results


@pytest.mark.parametrize("sides", PrecisionSides)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_losses_gradients_and_ranges_are_those_of_one_process(ranks, counts, sides):
    answers = ranks(len(counts), of_rank, counts, sides)
    for number, expected in enumerate(textbook(sides)):
        actual = [answer[number] for answer in answers]
        assert sum(one["loss"] for one in actual) == pytest.approx(expected["loss"], rel=1e-5)
        for name, value in expected["metrics"].items():
            assert sum(one["metrics"][name] for one in actual) == pytest.approx(value, rel=1e-5), name
        for index in (0, 1):
            gradient = torch.cat([one["grads"][index] for one in actual]).double()
            torch.testing.assert_close(gradient, expected["grads"][index], rtol=1e-4, atol=1e-6)
        for one in actual:
            for dim, values in expected["ranges"].items():
                torch.testing.assert_close(one["ranges"][f"inner.ranges.{dim}"], values, rtol=0, atol=1e-7)
    for answer in answers:  # the same bits on every rank, with rows and without
        for name, values in answers[0][-1]["ranges"].items():
            assert answer[-1]["ranges"][name].equal(values)


def test_values_are_those_of_the_codes_of_an_index():
    generator = torch.Generator().manual_seed(1)
    unit = F.normalize(torch.randn(50, 16, generator=generator), dim=1).requires_grad_()
    low, high = unit[:30].detach().amin(dim=0), unit[:30].detach().amax(dim=0)
    values = straight_through(unit, Quantiser(VectorPrecision.int8, Ranges(low, high)))
    stored = quantize_embeddings(unit.detach().numpy(), "int8", ranges=np.stack([low, high]))
    expected = low.numpy() + (stored.astype(np.float32) + 128.5) * (high - low).numpy() / 255
    assert values.detach().numpy() == pytest.approx(expected, abs=2e-7)
    binary = straight_through(unit, Quantiser(VectorPrecision.binary))
    bits = np.unpackbits(quantize_embeddings(unit.detach().numpy(), "ubinary"), axis=1)
    assert (binary > 0).numpy().tolist() == (bits == 1).tolist()
    torch.testing.assert_close(binary.norm(dim=1), torch.ones(50))
    weights = torch.randn(50, 16, generator=generator)
    for quantised in (values, binary):
        (gradient,) = torch.autograd.grad((quantised * weights).sum(), unit)
        assert gradient.equal(weights)


def of_layers(world: World) -> tuple[list[float], list[float], list[set[str]]]:
    """The losses of three layers, together and each of its own; metrics of batches with drawn precisions."""
    precisions = MatryoshkaConfig(precisions=[VectorPrecision.float, VectorPrecision.int8])
    layers = InfoNCEConfig(temperature=0.1, matryoshka=replace(precisions, layers=[2, 1], layer_weights=[0.25, 0.5]))
    combined = build_loss(layers, dimension=8, seed=0)
    one = InfoNCEConfig(temperature=0.1, matryoshka=precisions)
    alone = [build_loss(one, dimension=8, seed=0) for _ in range(3)]
    actual, expected = [], []
    for batch in batches()[:2]:
        queries, documents, info = batch.of_rank(range(5), torch.float32)
        of_layer = [(queries.roll(shift, 1) + shift, documents.roll(shift, 1) + shift) for shift in range(3)]
        encoded = (Encoded(tuple(map(Part, parts))) for parts in zip(*of_layer, strict=True))
        actual.append(combined(*encoded, info).local_loss.item())
        last, first, second = (loss(*pair, info).local_loss.item() for loss, pair in zip(alone, of_layer, strict=True))
        expected.append(last + (0.5 * first + 0.25 * second) / 2)
    drawing = build_loss(config(precisions_per_step=2), dimension=8, seed=0)
    metrics = []
    for number in range(8):
        object.__setattr__(info, "origin", info.origin._replace(batch=number))
        metrics.append({name for name in drawing(queries, documents, info).metrics if name.startswith("loss@8-")})
    return actual, expected, metrics


def test_layers_have_ranges_of_their_own_and_precisions_are_drawn(ranks):
    ((actual, expected, metrics),) = ranks(1, of_layers)
    assert actual == pytest.approx(expected, rel=1e-6)
    assert set(map(frozenset, metrics)) == {
        frozenset({"loss@8-float", f"loss@8-{drawn}"}) for drawn in ("int8", "binary")
    }


def of_sources(world: World) -> list[float]:
    """Two sources have losses of their own, and the same ranges."""
    precisions = MatryoshkaConfig(precisions=[VectorPrecision.float, VectorPrecision.int8])
    configs = [
        InfoNCEConfig(temperature=0.1, matryoshka=precisions),
        CombinedConfig(losses=[InfoNCEConfig(), OrthogonalConfig(weight=0.5)], matryoshka=precisions),
    ]
    loss = build_losses(configs, dimension=8, guide_dimensions=[{}, {}], seed=0)
    for source, batch in enumerate(batches()[:2]):
        queries, documents, info = batch.of_rank(range(5), torch.float32)
        object.__setattr__(info, "origin", info.origin._replace(source=source))
        loss(queries, documents, info)
    saved = checkpointed_weights(nn.ModuleDict({"loss": loss}))
    (values,) = {value.data_ptr(): value for name, value in saved.items() if ".ranges." in name}.values()
    return values.tolist()


def test_sources_with_losses_of_their_own_share_ranges(ranks):
    (actual,) = ranks(1, of_sources)
    expected: Tensor | None = None
    for batch in batches()[:2]:
        values = torch.cat([batch.queries, batch.documents]).float()
        extremes = torch.stack([values.amin(dim=0), values.amax(dim=0)])
        expected = extremes if expected is None else 0.99 * expected + 0.01 * extremes
    torch.testing.assert_close(torch.tensor(actual), expected)


def test_ranges_without_a_batch_are_not_exported(tmp_path):
    loss = build_loss(config(), dimension=8, seed=0)
    write_trained_ranges(tmp_path, loss.state_dict(), step=3)
    assert not (tmp_path / QUANTISATION_FILE).exists()
    loss.get_buffer("inner.ranges.4").copy_(torch.tensor([[-0.5] * 4, [0.25] * 4]))
    write_trained_ranges(tmp_path, loss.state_dict(), step=3)
    assert {dim: ranges.high.tolist() for dim, ranges in read_ranges(tmp_path).items()} == {4: [0.25] * 4}
