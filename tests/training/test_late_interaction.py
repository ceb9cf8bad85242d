"""Late-interaction models through the whole step: ranks and chunks change neither loss nor gradient.

The reference is one process in float64: every text encoded alone by transformers' class, the formula of MaxSim with
loops, plain autograd.
"""

import dataclasses
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.kind_settings import QueryExpansion
from embedtrain.config.losses import Implementation, InfoNCEConfig
from embedtrain.config.recipe import GradientReduction, ModelConfig, Pooling, Strategy
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch, TextRole
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import bound_tokenizer, load_model
from embedtrain.kinds.late_interaction.model import TokenVectorHead, TokenVectorLayout
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.build import build_loss
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from embedtrain.training.backward import Backward
from tests.models.test_late_interaction import late_interaction, own_class
from tests.small import batch, model_options, parallel, save_small, small_tokenizer, tokenised
from tests.training.test_losses import cut_for, whole

OPTIONS = {
    "query_expansion": QueryExpansion.min,
    "expansion_length": 7,
    "document_length": 9,
    "skiplist_words": ["alpha", "beta"],
}
TEMPERATURE = 0.3
ARCHITECTURES = ("bert", "modernbert")

Result = tuple[float, dict[str, Tensor]]


def opened(model: ModelConfig) -> tuple[Encoder, TextTokenizer]:
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    tokenizer = bound_tokenizer(source, small_tokenizer())
    assert isinstance(encoder.output, TokenVectorHead) and isinstance(tokenizer.layout, TokenVectorLayout)
    return encoder.double().eval(), tokenizer


def plain_loss(model: ModelConfig, rows: GlobalBatch) -> Result:
    """InfoNCE over all documents, and its gradient. A document that equals the positive is no negative."""
    encoder, tokenizer = opened(model)
    documents = [document for row in rows.rows for document in row.documents.texts]
    vectors = [own_class(encoder, tokenizer.tokens([document])) for document in documents]
    total, positive = torch.zeros((), dtype=torch.float64), 0
    for row in rows.rows:
        query = own_class(encoder, tokenizer.tokens([row.query], role=TextRole.query))
        scores = torch.stack([sum((vector @ token).max() for token in query) for vector in vectors]) / TEMPERATURE
        equal = torch.tensor([document == row.documents.texts[0] for document in documents])
        equal[positive] = False
        total = total + F.cross_entropy(scores.masked_fill(equal, -torch.inf), torch.tensor(positive)) / len(rows.rows)
        positive += len(row.documents.texts)
    total.backward()
    return total.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def on_ranks(
    world: World, model: ModelConfig, batches: list[GlobalBatch], ways: list[tuple[int, int, str]], strategy: Strategy
) -> list[list[Result]]:
    """The same of each batch, in each way: tokens of a chunk, tokens with activations, implementation of the loss."""
    shard_size = 2 if strategy is Strategy.hsdp else None
    options = parallel(strategy, shard_size=shard_size, gradient_reduction=GradientReduction.per_step)
    loaded = load_model(model, options, world, seed=0)
    results = []
    for rows in batches:
        results.append([])
        for chunk_tokens, activation_tokens, implementation in ways:
            loaded.encoder.zero_grad(set_to_none=True)
            loss = build_loss(
                InfoNCEConfig(temperature=TEMPERATURE, implementation=Implementation(implementation.split()[0])),
                dimension=loaded.encoder.dimension,
                seed=0,
                score=MaxSim(mean=False),
            )
            loaded.encoder.train(implementation == DROPOUT)
            backward = Backward(loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy())
            output, finite = backward(cut_for(rows, world, loaded.tokenizer, chunk_tokens, activation_tokens))
            assert finite
            grads = whole({n: p.grad for n, p in loaded.encoder.named_parameters() if p.grad is not None})
            results[-1].append((sum(world.gather(output.local_loss.item())), grads))
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ModelConfig]:
    """Backbones with dropout, to which a projection is added."""
    models = {}
    for architecture in ARCHITECTURES:
        model = late_interaction(architecture, dropout=0.2, **OPTIONS)
        backbone = model_options(config=model.config, pooling=Pooling.mean)
        path = str(save_small(backbone, tmp_path_factory.mktemp(architecture)))
        models[architecture] = dataclasses.replace(model, config=None, path=path)
    return models


@cache
def rows_of(num_rows: int, tokenizer: TextTokenizer) -> GlobalBatch:
    return tokenised(batch(num_rows), tokenizer)


DROPOUT = "plain with dropout"
WAYS = [(10_000, 10_000, "plain"), (60, 0, "tiled"), (60, 90, "ring"), (60, 0, DROPOUT), (60, 10_000, DROPOUT)]


def assert_equal_gradients(result: Result, expected: Result) -> None:
    (loss, grads), (expected_loss, expected_grads) = result, expected
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert grads.keys() == expected_grads.keys()
    norm = torch.stack([grad.norm() for grad in expected_grads.values()]).norm()
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).norm() <= 2e-5 * max(grad.norm(), 1e-3 * norm), name


@pytest.mark.parametrize(
    ("size", "architecture", "strategy"),
    [
        pytest.param(1, "bert", Strategy.ddp, marks=pytest.mark.slow),
        (3, "bert", Strategy.fsdp),
        pytest.param(2, "bert", Strategy.ddp, marks=pytest.mark.slow),
        pytest.param(4, "modernbert", Strategy.hsdp, marks=pytest.mark.slow),
    ],
)
def test_ranks_and_chunks_have_the_gradient_of_one_process(ranks, models, size, architecture, strategy):
    """Of two rows on three ranks, one has none."""
    model = models[architecture]
    tokenizer = opened(model)[1]
    batches = [rows_of(num_rows, tokenizer) for num_rows in (2, 7)]
    results = ranks(size, on_ranks, model, batches, WAYS, strategy)[0]
    for rows, of_batch in zip(batches, results, strict=True):
        expected = plain_loss(model, rows)
        *exact, encoded_twice, encoded_once = of_batch
        for result in exact:
            assert_equal_gradients(result, expected)
        # Dropout masks are those of the first pass when a chunk is encoded again.
        assert_equal_gradients(encoded_twice, encoded_once)
        assert encoded_once[0] != pytest.approx(expected[0], rel=1e-3)
