"""The claim that everything rests on: ranks, sharding and chunking never change the gradient.

The reference is the plain computation: one process, no sharding, every text encoded alone, float64.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from embedtrain.config.kind_settings import HeadActivation, HeadConfig, HeadInit
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import Attention, ModelConfig, ParallelConfig, Pooling, Strategy
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import clip_grad_norm
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.marks import slow_but
from tests.small import batch, model_options, parallel, save_small, small_model, small_tokenizer

TEMPERATURE = 0.2
HEADS = [HeadConfig(out=48, bias=True, activation=HeadActivation.silu, init=HeadInit.normal), HeadConfig(out=24)]
TOLERANCE = 1e-5


def plain_gradient(model: ModelConfig, rows: GlobalBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of every parameter in one process: textbook InfoNCE in float64."""
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    encoder.double().eval()
    tokenizer = small_tokenizer()

    def encode(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        hidden = encoder.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        pooled = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[source.vectors.pooling.value]
        for head in encoder.dense:
            pooled = head(pooled)
        return F.normalize(pooled, dim=0)

    queries = torch.stack([encode(row.query) for row in rows.rows])
    texts = [text for row in rows.rows for text in row.documents.texts]
    documents = torch.stack([encode(text) for text in texts])
    answers = {(row.query, row.documents.texts[0]) for row in rows.rows}
    total = torch.zeros((), dtype=torch.float64)
    offset = 0
    for i, row in enumerate(rows.rows):
        positives = [other.documents.texts[0] for other in rows.rows]
        right = {positive for positive in positives if (row.query, positive) in answers}
        kept = [j for j, text in enumerate(texts) if j == offset or text not in right]
        logits = documents[kept] @ queries[i] / TEMPERATURE
        total = total - F.log_softmax(logits, dim=0)[kept.index(offset)]
        offset += len(row.documents.texts)
    loss = total / len(rows.rows)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Architecture -> (model options, {number of rows: plain loss and gradient}), made once."""

    @lru_cache
    def make(architecture: str) -> ModelConfig:
        small = small_model(architecture)
        return replace(small, config=None, path=str(save_small(small, tmp_path_factory.mktemp(architecture))))

    return make


@lru_cache(maxsize=32)
def reference(path: str, pooling: Pooling, num_rows: int, has_heads: bool) -> tuple[float, dict[str, torch.Tensor]]:
    heads = HEADS if has_heads else []
    return plain_gradient(model_options(path=path, pooling=pooling, heads=heads), batch(num_rows))


def sharded_gradient(
    world: World, model: ModelConfig, options: ParallelConfig, cutting: ChunkOptions, num_rows: int
) -> tuple[float, dict[str, torch.Tensor], float, int, bool]:
    loaded = load_model(model, options, world, seed=0)
    loaded.encoder.eval()
    backward = Backward(
        loaded.encoder, InfoNCE(InfoNCEConfig(temperature=TEMPERATURE)), world, seed=0, dummy=loaded.tokenizer.dummy()
    )
    rank_batch = make_rank_batch(batch(num_rows), world.rank, world.size, loaded.tokenizer, cutting)
    output, finite = backward(rank_batch)
    assert finite
    assert loaded.tokenizer.packed is (model.attention is Attention.auto)
    assert all(isinstance(p, DTensor) for p in loaded.encoder.parameters())
    gradients = {
        name: p.grad.full_tensor() for name, p in loaded.encoder.named_parameters() if isinstance(p.grad, DTensor)
    }
    norm = float(clip_grad_norm(loaded.encoder.parameters(), None))
    return (
        output.local_loss.item(),
        gradients if world.is_main else {},
        norm,
        len(rank_batch.chunks),
        rank_batch.num_cached_graphs == len(rank_batch.chunks),
    )


def compare(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error of any parameter's gradient.

    Gradients that vanish (a key's bias shifts all scores alike) are measured against the whole gradient.
    """
    whole = torch.stack([g.norm() for g in expected.values()]).norm() or torch.tensor(1.0)
    assert actual.keys() == expected.keys()
    errors = {
        name: ((actual[name].double() - expected[name]).norm() / max(expected[name].norm(), 1e-3 * whole)).item()
        for name in expected
    }
    return max(errors.values())


# One piece, several pieces whose graphs are all kept, chunks encoded twice.
WAYS = [
    ChunkOptions(10_000, pass_overhead_tokens=10_000),
    ChunkOptions(40, 10_000, pass_overhead_tokens=4),
    ChunkOptions(40, pass_overhead_tokens=4),
]
MESHES = [(1, "fsdp", None), (2, "fsdp", None), (3, "fsdp", None), (4, "fsdp", None), (2, "ddp", None), (4, "hsdp", 2)]


@pytest.mark.quick("4-hsdp-2-xlm-roberta", "3-fsdp-None-xlm-roberta")
@pytest.mark.parametrize("architecture", slow_but(["xlm-roberta"], ["xlm-roberta", "bert", "llama"]))
@pytest.mark.parametrize(("world_size", "strategy", "shard_size"), MESHES)
def test_gradient_equals_one_process(ranks, models, architecture, world_size, strategy, shard_size):
    """In one piece, in several and cached, with 10 rows: uneven on 3 and 4 ranks."""
    options = parallel(Strategy(strategy), shard_size=shard_size)
    for way in WAYS:
        check(ranks, models(architecture), world_size, options, way, num_rows=10)


@pytest.mark.quick("3")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradient_of_new_heads_equals_one_process(ranks, models, world_size):
    check(ranks, replace(models("bert"), heads=HEADS), world_size, parallel(), WAYS[2], num_rows=10)


@pytest.mark.parametrize(("world_size", "strategy", "num_rows"), [(1, "fsdp", 10), (3, "fsdp", 10), (3, "ddp", 2)])
def test_gradient_of_a_static_table_equals_one_process(ranks, models, world_size, strategy, num_rows):
    """The rows of the table are sharded; with two rows, a rank has none. Special tokens are tokens here."""
    for way in WAYS[1:]:
        check(ranks, models("static_embedding"), world_size, parallel(Strategy(strategy)), way, num_rows)


@pytest.mark.quick("2-qwen3")
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_gradients_of_other_llms(ranks, models, architecture, world_size):
    """Norms of queries and keys; embeddings that are scaled, and layers that see a window alone."""
    for way in WAYS:
        check(ranks, models(architecture), world_size, parallel(), way, num_rows=10)


@pytest.mark.quick("llama")
@pytest.mark.parametrize("architecture", ["xlm-roberta", "llama"])
def test_padding_changes_nothing(ranks, models, architecture):
    """Everything else here is packed."""
    model = replace(models(architecture), attention=Attention.padded)
    for way in WAYS:
        check(ranks, model, 2, parallel(), way, num_rows=10)


@pytest.mark.parametrize("num_rows", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 3, 5))])
def test_ranks_without_rows_take_part(ranks, models, num_rows):
    """Fewer rows than ranks: the rest run dummies and the gradient is still the global batch's."""
    for way in WAYS:
        check(ranks, models("xlm-roberta"), 4, parallel(), way, num_rows)


@pytest.mark.quick("xlm-roberta")
@pytest.mark.parametrize("architecture", ["xlm-roberta", "llama"])
def test_activation_checkpointing_changes_nothing(ranks, models, architecture):
    for way in WAYS:
        check(ranks, models(architecture), 2, parallel(activation_checkpointing=True), way, num_rows=10)


@pytest.mark.slow
def test_compiled_blocks_change_nothing(ranks, models):
    """torch.compile, block by block; a minute or two of compiling."""
    for way in WAYS:
        check(ranks, models("xlm-roberta"), 2, parallel(compile=True), way, num_rows=10, timeout=580)


def check(ranks, model, world_size, options, way, num_rows, timeout=180):
    loss, expected = reference(model.path, model.pooling, num_rows, bool(model.heads))
    answers = ranks(world_size, sharded_gradient, model, options, way, num_rows, timeout=timeout)
    _, actual, norm, num_chunks, fits = answers[0]
    if num_rows == 10:
        assert (num_chunks > 1, fits) == (way != WAYS[0], way != WAYS[2])
    assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert compare(actual, expected) < TOLERANCE
    assert {answer[2] for answer in answers} == {norm}
    assert norm == pytest.approx(torch.stack([g.norm() for g in expected.values()]).norm().item(), rel=1e-5)


def kernels(world: World, head_size: int) -> list[tuple[bool, set[str]]]:
    """Whether gradients are needed, and torch's permitted kernels, in each computation of the first layer."""
    model = small_model("llama", attention=Attention.padded)
    model = replace(model, config=model.config | {"head_dim": head_size})
    loaded = load_model(model, parallel(activation_checkpointing=True), world, seed=0, tokenizer=small_tokenizer())
    recorded = list[tuple[bool, set[str]]]()

    def record(*args: object) -> None:
        cuda = torch.backends.cuda
        enabled = {
            "flash": cuda.flash_sdp_enabled(),
            "cudnn": cuda.cudnn_sdp_enabled(),
            "math": cuda.math_sdp_enabled(),
        }
        recorded.append((torch.is_grad_enabled(), {name for name, value in enabled.items() if value}))

    find_blocks(loaded.encoder)[0].self_attn.register_forward_pre_hook(record)
    backward = Backward(loaded.encoder, InfoNCE(InfoNCEConfig()), world, seed=0, dummy=loaded.tokenizer.dummy())
    backward(make_rank_batch(batch(5), world.rank, world.size, loaded.tokenizer, ChunkOptions(40)))
    assert torch.backends.cuda.flash_sdp_enabled()
    return recorded


@pytest.mark.parametrize(("head_size", "permitted"), [(128, {"flash", "cudnn", "math"}), (136, {"math"})])
def test_attention_has_one_kernel_with_and_without_gradients(ranks, head_size, permitted):
    """Torch 2.13 rejects two kernels for large heads only if gradients are needed; a replay needs the same kernel."""
    (recorded,) = ranks(1, kernels, head_size)
    needed = [needed for needed, _ in recorded]
    # The first chunk: with gradients, recomputed. The others: without, with, recomputed.
    assert needed.count(True) == 2 * (needed.count(False) + 1) > 2
    assert all(enabled == permitted for _, enabled in recorded)
