"""What is measured beside the loss, in a whole step: the same on any number of ranks, never in the gradient."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import Implementation, InfoNCEConfig
from embedtrain.config.recipe import Strategy
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.batch_statistics import RowSpec
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import batch, parallel, small_model, small_tokenizer

NAMES = ["positive_similarity", "hardest_negative_similarity", "false_negatives", "alignment", "uniformity"]


def measure(
    world: World, way: Implementation, measured: bool, sizes: tuple[int, ...] = (9,)
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """This rank's parts of the metrics, and the gradient."""
    model = small_model("xlm-roberta", dropout=0.1 if world.size == 2 else 0.0)
    loaded = load_model(model, parallel(Strategy.fsdp), world, seed=0, tokenizer=small_tokenizer())
    loaded.encoder.train()
    loss = InfoNCE(InfoNCEConfig(temperature=0.1, implementation=way))
    backward = Backward(
        loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy(), row_specs=[RowSpec()] if measured else None
    )
    rows = [batch(size, first=100 * number) for number, size in enumerate(sizes)]
    output, _ = backward(
        *(make_rank_batch(one, world.rank, world.size, loaded.tokenizer, ChunkOptions(60)) for one in rows),
        measured=True,
    )
    gradients = {
        name: p.grad.to_local() for name, p in loaded.encoder.named_parameters() if isinstance(p.grad, DTensor)
    }
    return {name: float(local_loss) for name, local_loss in output.metrics.items()}, gradients


def whole(answers: list[tuple[dict[str, float], dict[str, torch.Tensor]]]) -> dict[str, float]:
    return {name: sum(metrics[name] for metrics, _ in answers) for name in answers[0][0]}


@pytest.mark.quick("ring")
@pytest.mark.parametrize("way", [Implementation.plain, Implementation.tiled, Implementation.ring])
def test_the_gradient_stays_as_it_is_bit_for_bit(ranks, way):
    with_figures, without = (ranks(2, measure, way, measured) for measured in (True, False))
    for (_, actual), (_, expected) in zip(with_figures, without, strict=True):
        assert len(actual) > 10
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert list(whole(without)) == ["accuracy"]
    assert list(whole(with_figures)) == ["accuracy", *NAMES]


def test_metrics_do_not_depend_on_ranks(ranks):
    """Also for a step of two batches, whose means they are, and where ranks have no rows."""
    expected = whole(ranks(1, measure, Implementation.plain, True, (9, 3)))
    assert -1 < expected["hardest_negative_similarity"] <= 1
    actual = whole(ranks(4, measure, Implementation.plain, True, (9, 3)))
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)
