"""The vocabulary head that is the table of embeddings as well: one gradient, whatever the sharding and the chunks.

The reference is the plain computation in one process, in float64, with the logits of all tokens.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from embedtrain.config.kind_settings import SparseRegularizer, SparsityConfig
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import ModelConfig, ParallelConfig, Strategy
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.kinds.sparse.model import WordHead
from embedtrain.kinds.sparse.score import WordScore
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.sparsity import SparsityRegularized
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import (
    assert_same_gradient,
    batch,
    model_options,
    parallel,
    save_language_model,
    small_model,
    small_tokenizer,
)

TEMPERATURE = 5.0
SPARSITY = SparsityConfig(
    query_weight=0.3,
    document_weight=0.2,
    query_regularizer=SparseRegularizer.l1,
    document_threshold=37,
    ramp=0,
)
ONE_CHUNK, CACHED = ChunkOptions(10_000, pass_overhead_tokens=10_000), ChunkOptions(40, pass_overhead_tokens=4)


def plain_gradient(model: ModelConfig, rows: GlobalBatch) -> tuple[float, dict[str, torch.Tensor]]:
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    assert isinstance(encoder.output, WordHead)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    encoder.double().eval()
    tokenizer = small_tokenizer()

    def encode(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        hidden = encoder.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        hidden = encoder.head(input_ids=ids, inputs_embeds=hidden).logits[0]
        parts = dict(encoder.named_parameters())
        table = encoder.backbone.get_input_embeddings().weight if encoder.tied else parts["head.lm_head.weight"]
        bias = next((p for n, p in parts.items() if n.startswith("head.") and p.shape == (len(table),)), 0.0)
        return (hidden @ table.T + bias).amax(dim=0).relu().log1p()

    queries = torch.stack([encode(row.query) for row in rows.rows])
    texts = [text for row in rows.rows for text in row.documents.texts]
    documents = torch.stack([encode(text) for text in texts])
    answers = {(row.query, row.documents.texts[0]) for row in rows.rows}
    loss, first = torch.zeros((), dtype=torch.float64), 0
    for i, row in enumerate(rows.rows):
        positives = [other.documents.texts[0] for other in rows.rows]
        right = {positive for positive in positives if (row.query, positive) in answers}
        kept = [j for j, text in enumerate(texts) if j == first or text not in right]
        loss = loss - F.log_softmax(documents[kept] @ queries[i] / TEMPERATURE, dim=0)[kept.index(first)]
        first += len(row.documents.texts)
    loss = loss / len(rows.rows) + 0.3 * queries.sum(dim=1).mean()
    active = (documents > 0).sum(dim=1, keepdim=True) > 37
    assert source.config.model_type != "bert" or 0 < int(active.sum()) < len(active)
    loss = loss + 0.2 * (documents * active).mean(dim=0).square().sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def sharded_gradient(
    world: World, model: ModelConfig, options: ParallelConfig, cutting: ChunkOptions, num_rows: int
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    loaded = load_model(model, options, world, seed=0)
    loaded.encoder.eval()
    assert loaded.tokenizer.packed
    loss = SparsityRegularized(InfoNCE(InfoNCEConfig(temperature=TEMPERATURE), WordScore()), SPARSITY, ramp=0)
    backward = Backward(
        loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy(), reduce_per_step=cutting is ONE_CHUNK
    )
    local = make_rank_batch(batch(num_rows), world.rank, world.size, loaded.tokenizer, cutting)
    output, finite = backward(local)
    assert finite
    grads = {n: p.grad.full_tensor() for n, p in loaded.encoder.named_parameters() if isinstance(p.grad, DTensor)}
    return output.local_loss.item(), grads, {name: value.item() for name, value in output.metrics.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    built = {}

    def make(architecture: str, tied: bool) -> tuple[ModelConfig, tuple[float, dict[str, torch.Tensor]]]:
        if (architecture, tied) not in built:
            small = small_model(architecture, kind="sparse", pooling=None)
            small.config["tie_word_embeddings"] = tied
            directory = save_language_model(small, tmp_path_factory.mktemp(architecture))
            model = model_options(path=str(directory), kind="sparse")
            built[architecture, tied] = model, {rows: plain_gradient(model, batch(rows)) for rows in (10, 2)}
        return built[architecture, tied]

    return make


@pytest.mark.quick("bert-True-3-fsdp-False-2", "qwen3-False-2-fsdp-True-10")
@pytest.mark.parametrize(
    ("architecture", "tied", "world_size", "strategy", "recompute", "num_rows"),
    [
        ("bert", True, 1, "fsdp", False, 10),
        ("bert", True, 2, "fsdp", False, 10),
        ("bert", True, 2, "fsdp", True, 10),
        ("bert", True, 2, "ddp", False, 10),
        ("bert", True, 3, "fsdp", False, 2),
        ("qwen3", True, 2, "fsdp", False, 10),
        ("qwen3", False, 2, "fsdp", True, 10),
        pytest.param("xlm-roberta", True, 4, "hsdp", False, 10, marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_one_process(ranks, models, architecture, tied, world_size, strategy, recompute, num_rows):
    """In one chunk, and in several that are encoded twice; on 3 ranks with 2 rows, one rank has none."""
    model, references = models(architecture, tied)
    loss, expected = references[num_rows]
    options = parallel(
        Strategy(strategy), shard_size=2 if strategy == "hsdp" else None, activation_checkpointing=recompute
    )
    for cutting in (ONE_CHUNK, CACHED):
        answers = ranks(world_size, sharded_gradient, model, options, cutting, num_rows)
        assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-6)
        assert_same_gradient(answers[0][1], expected)


def test_metrics_do_not_depend_on_the_number_of_ranks(ranks, models):
    model, _ = models("bert", True)
    totals = []
    for world_size in (1, 3):
        answers = ranks(world_size, sharded_gradient, model, parallel(), ONE_CHUNK, 10)
        totals.append({name: sum(answer[2][name] for answer in answers) for name in answers[0][2]})
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    assert 10 < totals[0]["documents/active_words"] <= totals[0]["documents/active_words_p99"] <= 64
    assert totals[0]["queries/empty_texts"] == 0
