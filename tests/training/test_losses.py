"""Every loss through the whole step: ranks, chunks and graphs kept or not never change gradient, norm or update.

The reference is one process: an unsharded model in float64, every text encoded alone, plain autograd, plain
AdamW. What each loss makes of given vectors is tested against its formula in tests/losses.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.losses import (
    ADRMSEConfig,
    AnglEConfig,
    BatchTripletConfig,
    BCEConfig,
    CombinedConfig,
    ContrastiveConfig,
    CoSENTConfig,
    CosineMSEConfig,
    DistillEmbeddingsConfig,
    DistillScoresConfig,
    DistillSimilaritiesConfig,
    Divergence,
    Hardness,
    Implementation,
    InfoNCEConfig,
    LambdaLossConfig,
    LossConfig,
    LossDirection,
    MarginMSEConfig,
    MatryoshkaConfig,
    OnlineContrastiveConfig,
    OrthogonalConfig,
    PListMLEConfig,
    SentenceTransformersConfig,
    SigLIPConfig,
    Similarity,
    SimilarityMSEConfig,
    SoftmaxConfig,
    TripletConfig,
    TripletMining,
)
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import GradientReduction, ModelConfig, Strategy
from embedtrain.data.rows import Documents, Example
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.sharding import ParallelLayout, shard_encoder
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.losses.build import build_loss
from embedtrain.losses.types import FROM_ROWS
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from embedtrain.training.backward import Backward
from embedtrain.training.guides import load_guides
from embedtrain.training.optimizer import build_optimizer, clip_grad_norm
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from tests.marks import slow_but
from tests.small import (
    batch,
    model_options,
    parallel,
    save_guide,
    save_small,
    small_model,
    small_tokenizer,
    text,
    tokenised,
)

TOLERANCE = 1e-5
# A large eps: with a small one the first step is the gradient's sign, and that of rounding errors where it is 0.
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.05)
WIDTH = 32
ALL_SIDES = list(LossDirection)
WAYS = Implementation

LOSSES: dict[str, LossConfig] = {
    "infonce": InfoNCEConfig(temperature=0.2),
    "infonce, tiled": InfoNCEConfig(
        temperature=0.2, directions=ALL_SIDES, implementation=WAYS.tiled, learn_temperature=True
    ),
    "infonce, ring": InfoNCEConfig(
        temperature=0.2, directions=ALL_SIDES, implementation=WAYS.ring, learn_temperature=True
    ),
    "infonce, own negatives": InfoNCEConfig(temperature=0.2, in_batch_negatives=False),
    "infonce, hardness": InfoNCEConfig(
        temperature=0.2, hardness=Hardness.all, hardness_strength=2.0, false_negative_margin=0.3
    ),
    "matryoshka": InfoNCEConfig(
        temperature=0.2,
        learn_temperature=True,
        matryoshka=MatryoshkaConfig(dims=[8, 32, 16], dim_weights=[0.5, 1.0, 0.7]),
    ),
    "matryoshka, ring": InfoNCEConfig(
        temperature=0.2, matryoshka=MatryoshkaConfig(dims=[32, 16, 8], dims_per_step=2), implementation=WAYS.ring
    ),
    # Not int8, whose codes differ between float32 and float64: see tests/losses/test_quantised.py.
    "quantised": InfoNCEConfig(
        temperature=0.2,
        matryoshka=MatryoshkaConfig(
            dims=[32, 8], precisions=[VectorPrecision.float, VectorPrecision.binary], precision_weights=[1.0, 0.5]
        ),
    ),
    "siglip": SigLIPConfig(temperature=0.3, bias=-2.0),
    "siglip, ring": SigLIPConfig(
        temperature=0.3, bias=-2.0, matryoshka=MatryoshkaConfig(dims=[32, 8]), implementation=WAYS.ring
    ),
    "cosent": CoSENTConfig(temperature=0.2),
    "angle": AnglEConfig(temperature=0.2),
    "cosine_mse": CosineMSEConfig(matryoshka=MatryoshkaConfig(dims=[32, 16])),
    "contrastive": ContrastiveConfig(),
    "online_contrastive": OnlineContrastiveConfig(),
    "triplet": TripletConfig(),
    "batch_triplet": BatchTripletConfig(),
    "batch_triplet, all": BatchTripletConfig(mining=TripletMining.all),
    "distill_scores": DistillScoresConfig(temperature=0.5, times_squared_temperature=True),
    "margin_mse": MarginMSEConfig(),
    "bce": BCEConfig(temperature=0.1),
    "softmax": SoftmaxConfig(temperature=0.2),
    "plistmle": PListMLEConfig(temperature=0.2),
    "lambdaloss": LambdaLossConfig(temperature=0.2, similarity=Similarity.dot),
    "adr_mse": ADRMSEConfig(temperature=0.2),
    "distill_embeddings": DistillEmbeddingsConfig(matryoshka=MatryoshkaConfig(dims=[32, 8])),
    "distill_embeddings, projected": DistillEmbeddingsConfig(project=True),
    "distill_similarities, ring": DistillSimilaritiesConfig(
        temperature=0.2, divergence=Divergence.js, matryoshka=MatryoshkaConfig(dims=[32, 8]), implementation=WAYS.ring
    ),
    "similarity_mse": SimilarityMSEConfig(),
    "combined": CombinedConfig(
        losses=[
            InfoNCEConfig(temperature=0.2),
            DistillScoresConfig(temperature=0.3, weight=0.7),
            MarginMSEConfig(weight=0.1),
            OrthogonalConfig(weight=0.5),
        ]
    ),
    "classifier": SentenceTransformersConfig(class_name="SoftmaxLoss", arguments={"num_labels": 3}),
    "cached": SentenceTransformersConfig(
        class_name="CachedMultipleNegativesRankingLoss", arguments={"scale": 5, "mini_batch_size": 2}
    ),
}


def rows_for(config: LossConfig, num_rows: int, step: int = 0) -> GlobalBatch:
    """Rows that hold what the loss needs, of unequal lengths."""
    needs = config.row_requirements
    classes = isinstance(config, SentenceTransformersConfig) and config.class_name == "SoftmaxLoss"
    wide = isinstance(config, DistillEmbeddingsConfig) and config.project
    built = []
    for i, row in enumerate(batch(num_rows, first=7 * step).rows):
        documents = row.documents.texts
        if needs.negatives or needs.same_num_documents:
            documents = (documents[0], text(300 + i, 4 + i % 5))
        if classes:
            documents = documents[:1]
        if needs.label:
            documents = ()
        scores = tuple(((3 * i + 5 * j) % 11) / 10 for j in range(len(documents)))
        if type(config) in (ContrastiveConfig, OnlineContrastiveConfig):
            scores = tuple(float(j == 0) for j in range(len(documents)))
        random = torch.Generator().manual_seed(i)
        width = WIDTH + 5 * wide
        built.append(
            Example(
                row.query,
                Documents(documents, tuple(float(i % 3) for _ in documents) if classes else scores),
                label=i % 3 if needs.label else None,
                vectors=tuple(torch.randn(1 + len(documents), width, generator=random).tolist())
                if needs.vectors
                else (),
            )
        )
    return tokenised(GlobalBatch(step, tuple(built)), load_tokenizer())


def loss_of(config: LossConfig) -> nn.Module:
    widths = {FROM_ROWS: WIDTH + 5} if isinstance(config, DistillEmbeddingsConfig) and config.project else {}
    return build_loss(config, dimension=WIDTH, guide_dimensions=widths, seed=1)


StepResult = tuple[float, dict[str, float], dict[str, Tensor], float, dict[str, Tensor]]


def one_process(world: World, model: ModelConfig, config: LossConfig, batches: list[GlobalBatch]) -> StepResult:
    """Loss, measures, gradients, norm and updated weights, all in float64."""
    encoder = plain_encoder(model)
    loss = loss_of(config).double()
    tokenizer = load_tokenizer()
    total, measures, num_rows = torch.zeros(()), dict[str, float](), sum(len(rows.rows) for rows in batches)
    for rows in batches:
        rank_batch = cut_for(rows, world, tokenizer, 10_000, 10_000)
        texts = [row.query for row in rows.rows] + [t for row in rows.rows for t in row.documents.texts]
        vectors = torch.cat([encode(encoder, tokenizer, one) for one in texts])
        output = loss(vectors[: rank_batch.num_queries], vectors[rank_batch.num_queries :], rank_batch.batch_info)
        weight = len(rows.rows) / num_rows
        total = total + weight * output.local_loss
        for name, value in output.metrics.items():
            measures[name] = measures.get(name, 0.0) + weight * value.item()
    total.backward()
    named = dict(parameters(encoder, loss))
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for gradient in named.values():
        if gradient.grad is not None:
            gradient.grad *= min(1.0, OPTIM.max_grad_norm / max(norm.item(), 1e-12))
    build_optimizer(encoder, replace(OPTIM), loss).step()
    return total.item(), measures, gradients, norm.item(), {n: p.detach().clone() for n, p in named.items()}


def plain_encoder(model: ModelConfig) -> Encoder:
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    return encoder.double().eval()


def load_tokenizer() -> TextTokenizer:
    return TextTokenizer(small_tokenizer(), 48)


def encode(encoder: Encoder, tokenizer: TextTokenizer, one: str) -> Tensor:
    """The vector [1, D] of a text encoded alone, in float64: the encoder's own forward ends in float32."""
    ids = torch.tensor(tokenizer.ids([one]))
    hidden = encoder.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    return F.normalize(hidden.mean(dim=1), dim=1)


def parameters(encoder: nn.Module, loss: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [*encoder.named_parameters(), *((f"loss.{name}", p) for name, p in loss.named_parameters())]


def local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def cut_for(
    rows: GlobalBatch,
    world: World,
    tokenizer: TextTokenizer,
    chunk_tokens: int,
    activation_tokens: int,
) -> RankBatch:
    width = len(rows.rows[0].vectors[0]) if rows.rows[0].vectors else None
    cutting = ChunkOptions(chunk_tokens, activation_tokens, pass_overhead_tokens=8)
    return make_rank_batch(rows, world.rank, world.size, tokenizer, cutting, teacher_dimension=width)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The full tensors in float64, by one exchange of all shards: one for each tensor takes longer than the step."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    full = dict(tensors)
    if sharded:
        group = next(iter(sharded.values())).device_mesh["shard"].get_group()
        shards: list[dict[str, np.ndarray]] = [{} for _ in range(group.size())]
        dist.all_gather_object(shards, {name: t.to_local().detach().numpy() for name, t in sharded.items()}, group)
        for name, tensor in sharded.items():
            (dim,) = (placement.dim for placement in tensor.placements if placement.is_shard())
            full[name] = torch.from_numpy(np.concatenate([shard[name] for shard in shards], axis=dim))
    return {name: tensor.detach().double().clone() for name, tensor in full.items()}


def on_ranks(
    world: World,
    model: ModelConfig,
    cases: list[tuple[LossConfig, list[GlobalBatch]]],
    ways: list[tuple[int, int, GradientReduction]],
    strategy: Strategy,
) -> list[list[StepResult]]:
    """The same of each case by ranks, in each way: (tokens of a chunk, tokens kept, what is kept of gradients)."""
    loaded = {
        way: load_model(
            model,
            parallel(strategy, shard_size=2 if strategy is Strategy.hsdp else None, gradient_reduction=way),
            world,
            seed=0,
        )
        for way in dict.fromkeys(gradient_reduction for _, _, gradient_reduction in ways)
    }
    start = {way: [local(p).detach().clone() for p in one.encoder.eval().parameters()] for way, one in loaded.items()}

    def fresh(gradient_reduction: GradientReduction) -> LoadedModel:
        """The model as it was loaded; loading it again takes longer than all the rest."""
        encoder = loaded[gradient_reduction].encoder
        encoder.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(encoder.parameters(), start[gradient_reduction], strict=True):
                local(parameter).copy_(value)
        return loaded[gradient_reduction]

    answers = []
    for config, batches in cases:
        actual = []
        for chunk_tokens, activation_tokens, gradient_reduction in ways:
            live = fresh(gradient_reduction)
            loss = loss_of(config)
            optimizer = build_optimizer(live.encoder, OPTIM, loss)
            backward = Backward(
                live.encoder,
                loss,
                world,
                seed=0,
                dummy=live.tokenizer.dummy(),
                reduce_per_step=live.reduce_per_step,
            )
            rank_batch = [cut_for(rows, world, live.tokenizer, chunk_tokens, activation_tokens) for rows in batches]
            output, finite = backward(*rank_batch)
            assert finite
            named = dict(parameters(live.encoder, loss))
            gradients = whole({name: p.grad for name, p in named.items() if p.grad is not None})
            norm = float(clip_grad_norm(named.values(), OPTIM.max_grad_norm))
            optimizer.step()
            value = sum(world.gather(output.local_loss.item()))
            measures = {name: sum(world.gather(local_loss.item())) for name, local_loss in output.metrics.items()}
            updated = whole(named)
            actual.append((value, measures, gradients, norm, updated) if world.is_main else None)
        answers.append(actual)
    return answers


def agree(actual: StepResult, expected: StepResult, case: str) -> None:
    (value, measures, gradients, norm, updated), (loss, rest, expected_gradients, whole_norm, weights) = (
        actual,
        expected,
    )
    assert value == pytest.approx(loss, rel=1e-5, abs=1e-6), case
    assert measures.keys() == rest.keys(), case
    for name, measure in rest.items():
        assert measures[name] == pytest.approx(measure, rel=2e-5, abs=2e-6), (case, name)
    assert norm == pytest.approx(whole_norm, rel=2e-5), case
    assert gradients.keys() == expected_gradients.keys(), case
    for name, expected_gradient in expected_gradients.items():
        # Gradients that vanish (a key's bias shifts all scores alike; a temperature's is a difference of large sums)
        # are measured against the whole gradient.
        floor = 0.1 if name.startswith("loss.") else 1e-3
        error = (gradients[name] - expected_gradient).norm() / max(
            expected_gradient.norm().item(), floor * whole_norm, 1e-9
        )
        assert error < 2 * TOLERANCE, (case, name, float(error))
    for name, weight in weights.items():
        assert (updated[name] - weight).norm() <= TOLERANCE * max(1.0, weight.norm()), (case, name)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    small = small_model("bert")
    return replace(small, config=None, path=str(save_small(small, tmp_path_factory.mktemp("bert"))))


@pytest.fixture(scope="module")
def reference(ranks, model):
    @lru_cache
    def make(name: str, num_rows: int, num_batches: int = 1) -> StepResult:
        batches = [rows_for(LOSSES[name], num_rows, step) for step in range(num_batches)]
        return ranks(1, one_process, model, LOSSES[name], batches)[0]

    return make


KEPT = (10_000, 10_000, GradientReduction.per_step)
CACHED = (60, 0, GradientReduction.per_step)
PARTLY = (60, 130, GradientReduction.per_step)
CACHED_SHARDED = (60, 60, GradientReduction.per_chunk)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(2, [PARTLY]), *(pytest.param(n, [KEPT, CACHED, PARTLY], marks=SLOW) for n in (1, 2, 3, 4))],
)
def test_every_loss(ranks, model, reference, world_size, ways):
    """Gradient, clip norm and update; 10 rows, uneven on 3 and 4 ranks; all kept, none, and the longest."""
    cases = [(config, [rows_for(config, 10)]) for config in LOSSES.values()]
    answers = ranks(world_size, on_ranks, model, cases, ways, Strategy.fsdp, timeout=580)[0]
    for name, actual in zip(LOSSES, answers, strict=True):
        for way, one in zip(ways, actual, strict=True):
            agree(one, reference(name, 10), f"{name}, {way}, {world_size} ranks")


@pytest.mark.slow
def test_ranks_without_rows(ranks, model, reference):
    """Three rows on four ranks."""
    cases = [(config, [rows_for(config, 3)]) for config in LOSSES.values()]
    answers = ranks(4, on_ranks, model, cases, [KEPT, CACHED], Strategy.fsdp, timeout=580)[0]
    for name, actual in zip(LOSSES, answers, strict=True):
        for one in actual:
            agree(one, reference(name, 3), f"{name}, 3 rows on 4 ranks")


SOME = ["combined", "matryoshka", "distill_embeddings, projected"]


@pytest.mark.quick("4-hsdp")
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "ddp"), (2, "fsdp"), (4, "hsdp")])
def test_gradients_reduced_after_every_chunk(ranks, model, reference, world_size, strategy):
    cases = [(LOSSES[name], [rows_for(LOSSES[name], 10)]) for name in SOME]
    ways = [CACHED_SHARDED, CACHED]
    answers = ranks(world_size, on_ranks, model, cases, ways, Strategy(strategy), timeout=300)[0]
    for name, actual in zip(SOME, answers, strict=True):
        for one in actual:
            agree(one, reference(name, 10), f"{name}, {strategy}")


@pytest.mark.parametrize("world_size", slow_but([3], [1, 3]))
def test_accumulation(ranks, model, reference, world_size):
    """A step over three global batches, each with its own negatives: the mean over all their rows."""
    cases = [(LOSSES[name], [rows_for(LOSSES[name], 10, step) for step in range(3)]) for name in SOME]
    ways = [KEPT, PARTLY, CACHED_SHARDED]
    answers = ranks(world_size, on_ranks, model, cases, ways, Strategy.fsdp, timeout=300)[0]
    for name, actual in zip(SOME, answers, strict=True):
        for one in actual:
            agree(one, reference(name, 10, 3), f"{name}, accumulated, {world_size} ranks")


def adapters(world: World, model: ModelConfig, chunk_tokens: int, activation_tokens: int) -> dict[str, Tensor]:
    """Gradient of LoRA adapters on a frozen base, sharded unless there is one rank."""
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False, lora_dropout=0.0)
    inject_adapter_in_model(lora, encoder.backbone)
    options = parallel()
    layout = ParallelLayout(options.strategy, 1, world.size, "")
    shard_encoder(encoder, find_blocks(encoder, None), layout, options, world.device)
    encoder.eval()
    config = LOSSES["matryoshka"]
    loss, tokenizer = loss_of(config), load_tokenizer()
    backward = Backward(encoder, loss, world, seed=0, dummy=tokenizer.dummy())
    backward(cut_for(rows_for(config, 10), world, tokenizer, chunk_tokens, activation_tokens))
    named = parameters(encoder, loss)
    assert all(p.grad is None for name, p in named if "lora" not in name and "loss." not in name)
    return whole({name: p.grad for name, p in named if p.grad is not None})


def test_adapters_on_a_frozen_model(ranks, model):
    (expected,) = ranks(1, adapters, model, 10_000, 10_000)
    assert sum("lora" in name for name in expected) == 8
    for world_size, way in ((2, (60, 130)), (3, (60, 0))):
        actual = ranks(world_size, adapters, model, *way)[0]
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (actual[name] - gradient).norm() <= 2e-5 * gradient.norm(), (name, world_size, way)


def guided(world: World, path: str, num_rows: int) -> list[list[Tensor]]:
    (guides, notes) = load_guides([path], parallel(), world, chunk_tokens=60)
    guide = guides[path]
    assert "guide" in notes[0]
    texts = {path: guide.texts}
    rank_batch = make_rank_batch(
        batch(num_rows), world.rank, world.size, load_tokenizer(), ChunkOptions(10_000), guides=texts
    )
    assert not any(p.requires_grad for p in guide.encoder.parameters())
    seen = guide(rank_batch.guides[path], rank_batch.num_queries)
    assert not seen.queries.requires_grad
    return [seen.queries.tolist(), seen.documents.tolist()]


@pytest.mark.parametrize("world_size", slow_but([4], [1, 2, 4]))
def test_a_guide_sees_the_texts_without_the_models_prompt(ranks, tmp_path, world_size):
    rows = batch(3).rows
    guide = save_guide(small_model("bert"), tmp_path)
    encoder = plain_encoder(model_options(path=str(guide)))
    answers = ranks(world_size, guided, str(guide), 3)
    for rank, (queries, documents) in enumerate(answers):
        local_loss = rows[rank::world_size]
        texts = [row.query for row in local_loss], [t for row in local_loss for t in row.documents.texts]
        for actual, expected in zip((queries, documents), texts, strict=True):
            assert len(actual) == len(expected)
            for vector, one in zip(actual, expected, strict=True):
                right = encode(encoder, load_tokenizer(), one)[0]
                torch.testing.assert_close(torch.tensor(vector).double(), right, rtol=1e-4, atol=1e-5)
