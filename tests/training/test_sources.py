"""Sources with losses of their own: each batch is given to its own, on every rank, and only what is used is trained."""

from dataclasses import replace

import pytest
from torch import Tensor

from embedtrain.config.losses import CoSENTConfig, DistillEmbeddingsConfig, InfoNCEConfig
from embedtrain.config.recipe import ModelConfig, Pooling
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.build import build_loss, build_losses, loss_notes
from embedtrain.losses.combine import LossPerSource
from embedtrain.losses.types import FROM_ROWS
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import batch, model_options, parallel, save_small, small_model, text_tokenizer, tokenised

LEARNT = InfoNCEConfig(temperature=0.2, learn_temperature=True)
OWN = InfoNCEConfig(temperature=0.1, learn_temperature=True, in_batch_negatives=False)
PAIRS = CoSENTConfig()
CONFIGS = [LEARNT, OWN, LEARNT, PAIRS]
NAMES = ["a", "b", "c", "d"]


def rows_of(source: int) -> GlobalBatch:
    rows = []
    for i, row in enumerate(batch(9, first=source).rows):
        scores = tuple((i * 3 + j) % 5 / 4 for j in range(len(row.documents)))
        first = len(row.positives)
        positives, negatives = (
            replace(row.positives, scores=scores[:first]),
            replace(row.negatives, scores=scores[first:]),
        )
        rows.append(replace(row, positives=positives, negatives=negatives))
    return tokenised(GlobalBatch(source, tuple(rows), source=source), text_tokenizer())


StepResult = tuple[float, dict[str, float], dict[str, Tensor], list[bool]]


def step_of(world: World, model: ModelConfig, sources: list[int], alone: bool) -> StepResult:
    """A step on one batch of each source: by one loss that knows of all, or by each source's alone, one by one."""
    loaded = load_model(model, parallel(), world, seed=0)
    loaded.encoder.eval()
    widths = [dict[str, int]()] * len(CONFIGS)
    whole = build_losses(CONFIGS, dimension=32, guide_dimensions=widths, seed=1)
    dummy = loaded.tokenizer.dummy()
    local_loss, measures = 0.0, dict[str, float]()
    if alone:
        for source in sources:
            loss = build_loss(CONFIGS[source], dimension=32, seed=1)
            rank_batch = make_rank_batch(
                rows_of(source), world.rank, world.size, loaded.tokenizer, ChunkOptions(10_000)
            )
            output, _ = Backward(loaded.encoder, loss, world, seed=0, dummy=dummy)(rank_batch)
            local_loss += output.local_loss.item() / len(sources)
        scale = 1 / len(sources)
    else:
        batches = [rows_of(source) for source in sources]
        rank_batch = [
            make_rank_batch(one, world.rank, world.size, loaded.tokenizer, ChunkOptions(60, pass_overhead_tokens=8))
            for one in batches
        ]
        output, finite = Backward(loaded.encoder, whole, world, seed=0, dummy=dummy, sources=NAMES)(*rank_batch)
        assert finite
        local_loss, scale = output.local_loss.item(), 1.0
        measures = {name: value.item() for name, value in output.metrics.items()}
    gradients = {
        name: p.grad.full_tensor().double() * scale  # type: ignore[attr-defined]
        for name, p in loaded.encoder.named_parameters()
        if p.grad is not None
    }
    return local_loss, measures, gradients, [p.grad is not None for p in whole.parameters()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_small(small_model("xlm-roberta"), tmp_path_factory.mktemp("model"))
    return model_options(path=str(path), pooling=Pooling.mean)


@pytest.mark.quick("sources0-3", "sources3-3", "sources2-1", "sources1-1")
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("sources", [[0], [1], [3], [2, 3, 1]])
def test_each_batch_has_the_loss_of_its_source(ranks, model, world_size, sources):
    ((expected, _, plain, _),) = ranks(1, step_of, model, sources, True)
    answers = ranks(world_size, step_of, model, sources, False)
    assert sum(answer[0] for answer in answers) == pytest.approx(expected, rel=1e-5)
    for name, gradient in plain.items():
        actual = answers[0][2][name]
        assert (actual - gradient).norm() <= 1e-4 * max(gradient.norm(), 1e-3), name
    # Each source's own loss is reported, not its part of the step's.
    output = {name: sum(answer[1][name] for answer in answers) for name in answers[0][1] if name.startswith("loss/")}
    assert set(output) == {f"loss/{NAMES[source]}" for source in sources}
    assert sum(output.values()) / len(output) == pytest.approx(expected, rel=1e-5)
    # A temperature that no batch of the step used must not move by the optimiser's momentum.
    used = {0: [True, False], 1: [False, True], 3: [False, False]}
    is_trained = [any(used.get(source, used[0])[i] for source in sources) for i in range(2)]
    assert [answer[3] for answer in answers] == [is_trained] * world_size


def test_losses_are_shared_by_sources_that_have_the_same():
    loss = build_losses(CONFIGS, dimension=8, guide_dimensions=[{}] * 4, seed=0)
    assert isinstance(loss, LossPerSource)
    assert loss.for_source(0) is loss.for_source(2)
    assert len({id(loss.for_source(source)) for source in range(4)}) == 3
    alone = build_losses([LEARNT, LEARNT], dimension=8, guide_dimensions=[{}] * 2, seed=0)
    assert alone.for_source(1) is alone
    note = loss_notes(CONFIGS, NAMES, loss, 8)[0]
    for part in ("infonce (temperature=0.2, in_batch_negatives=True) for a, c", "for b", "cosent for d"):
        assert part in note


def test_teachers_of_several_widths():
    widths = [{FROM_ROWS: 11}, {FROM_ROWS: 12}]
    config = DistillEmbeddingsConfig(project=True)
    with pytest.raises(ConfigError, match=r"loss=distill_embeddings.*\(11, 12\)"):
        build_losses([config, config], dimension=8, guide_dimensions=widths, seed=0)
    losses = [config, DistillEmbeddingsConfig(project=True, weight=1.0, distance="mse")]
    loss = build_losses(losses, dimension=8, guide_dimensions=widths, seed=0)
    assert [tuple(p.shape) for p in loss.parameters()] == [(11, 8), (11,), (12, 8), (12,)]
