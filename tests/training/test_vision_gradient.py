"""The gradient of a vision-language model is that of the same global batch in one process, in float64.

The reference encodes every item alone by transformers' own class, unsharded, and computes the textbook loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from embedtrain.config.evaluation import Unshard
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import LoraConfig, Strategy
from embedtrain.data.images.item import item_parts
from embedtrain.data.images.processing import FixedSize, ImageProcessing, QwenPatches, Tiles
from embedtrain.data.rows import Documents, Example
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, GlobalBatch, Tokens
from embedtrain.distributed import sharding
from embedtrain.distributed.sharding import ParallelLayout, copy_local_rows, shard_encoder, warm_up
from embedtrain.distributed.world import World
from embedtrain.formats.chat_template import ItemTemplate
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.kinds.dense.model import Markup, VisionLayout, to_pixels
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.adapters import add_adapters, base_name
from embedtrain.models.blocks import find_blocks
from embedtrain.models.encoder import Encoder
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.image_text.models import picture_item
from tests.small import Collectives, parallel, small_tokenizer, text, tokenised
from tests.vision_models import END, IMAGE, QWEN, START, class_features, vision_encoder

TEMPERATURE = 0.2
# One chunk of all items with pictures and one of the others, and chunks of which some are encoded twice.
WAYS = [ChunkOptions(10_000, pass_overhead_tokens=10_000), ChunkOptions(50, 60, pass_overhead_tokens=4)]
LORA = LoraConfig(rank=2, targets=["q_proj", "down_proj"])


@dataclass(frozen=True)
class Case:
    architecture: str
    rows: str = "mixed"
    frozen: bool = False
    lora: bool = False


CASES = [
    Case("qwen3_vl"),
    Case("qwen3_vl", "few"),
    Case("qwen3_vl", "texts"),
    Case("qwen2_5_vl", frozen=True),
    Case("qwen2_vl", lora=True),
    Case("idefics3", "few"),
    Case("modernvbert", "few"),
    Case("paligemma"),
    Case("paligemma", "few"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for seed in range(12):
        picture_item(folder, seed)
    return folder


def rows_of(kind: str, folder: Path) -> GlobalBatch:
    if kind == "texts":
        return GlobalBatch(0, tuple(Example(text(i, 2 + i), Documents((text(9 + i, 3),))) for i in range(3)))
    if kind == "few":
        pairs = [(text(i, 1 + i), text(i + 5, 4)) for i in range(4)]
        pairs[0] = (text(0, 2), f"{text(1, 2)} {picture_item(folder, 0)}")
        return GlobalBatch(0, tuple(Example(query, Documents((document,))) for query, document in pairs))
    one, two = picture_item(folder, 7), picture_item(folder, 8)
    return GlobalBatch(
        0,
        (
            Example(f"{one} {text(20, 6)}", Documents((text(21, 2), two))),
            Example(text(22, 3), Documents((f"{one} {text(3, 2)} {two}", text(24, 5)))),
            *(Example(text(i, 1 + i), Documents((picture_item(folder, i),))) for i in range(3)),
        ),
    )


@cache
def processing_of(architecture: str) -> ImageProcessing:
    common: dict[str, Any] = {
        "resample": 3, "scale": 1 / 255, "mean": (0.5,) * 3, "std": (0.5,) * 3, "patch_size": 4
    }  # fmt: skip
    if architecture in QWEN:
        return QwenPatches(**common, merge_size=2, temporal_size=2, min_area=64, max_area=1024)
    if architecture == "paligemma":
        return FixedSize(**common, size={"height": 16, "width": 16})
    return Tiles(**common, size={"longest_edge": 32}, tile=16, splits=True, shuffle=2)


def make_encoder(case: Case) -> tuple[Encoder, TextTokenizer]:
    """An encoder in float64, and the tokenizer."""
    encoder, processing = vision_encoder(case.architecture, torch.float64), processing_of(case.architecture)
    family = encoder.vision
    assert family is not None
    family.to_pixels = to_pixels(processing)

    def picture(rows: int, columns: int) -> list[int]:
        if isinstance(processing, QwenPatches | FixedSize):
            return [START, *[IMAGE] * (rows * columns // family.merge**2), END]
        return [START, *([*[IMAGE] * 4, END] * (rows * columns + 1))]

    template = ItemTemplate.of_text("x y {prompt}{item} z", "", None)
    markup = Markup(replace(template, special_tokens=False), IMAGE, picture)
    layout = VisionLayout(small_tokenizer(), processing, family, markup, max_patches=200)
    if case.frozen:
        for module in encoder.vision_modules:
            module.requires_grad_(False)
    if case.lora:
        add_adapters(encoder, LORA, None, torch.float64)
        torch.manual_seed(5)
        for name, parameter in encoder.named_parameters():
            if base_name(name) is None:
                parameter.data.normal_(std=0.1)
    return encoder, TextTokenizer(small_tokenizer(), 200, layout, packed=True)


def plain_gradient(case: Case, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    encoder, tokenizer = make_encoder(case)
    batch = rows_of(case.rows, folder)

    def vector(item: str) -> torch.Tensor:
        chunk = tokenizer.chunk(tokenizer.tokens([item]), [0])
        assert ("pixels" in chunk.decoded) is (len(item_parts(item)) > 1 or "\ufdd0" in item)
        return F.normalize(class_features(case.architecture, encoder, chunk), dim=-1)

    queries = torch.stack([vector(row.query) for row in batch.rows])
    documents = torch.stack([vector(item) for row in batch.rows for item in row.documents.texts])
    firsts = torch.tensor([len(row.documents.texts) for row in batch.rows]).cumsum(0)
    positives = torch.cat([torch.zeros(1, dtype=torch.int64), firsts[:-1]])
    loss = F.cross_entropy(queries @ documents.T / TEMPERATURE, positives)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


@patch.object(sharding, "_precision", lambda _: MixedPrecisionPolicy())  # ranks are used again
def sharded_gradients(world: World, folder: Path, cases: list[Case], strategy: str, reduce_per_step: bool) -> Any:
    """Of each case and way: the local loss, the gradients, whether chunks have pictures, and numbers of collectives."""
    answers = []
    for case in cases:
        encoder, tokenizer = make_encoder(case)
        state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        shard = {"ddp": 1, "hsdp": 2}.get(strategy, world.size)
        layout = ParallelLayout(Strategy(strategy), world.size // shard, shard, "", activation_checkpointing=True)
        shard_encoder(encoder, find_blocks(encoder), layout, parallel(), world.device)
        for name, tensor in encoder.state_dict().items():
            copy_local_rows(tensor, state[name])
        warm_up(encoder, Chunk.of_one_token(world.device))
        is_group = [isinstance(module, FSDPModule) for module in encoder.vision_modules]
        assert all(is_group) is not (case.frozen or case.lora)
        loss = InfoNCE(InfoNCEConfig(temperature=TEMPERATURE))
        backward = Backward(encoder, loss, world, seed=0, dummy=tokenizer.dummy(), reduce_per_step=reduce_per_step)
        for way in WAYS:
            encoder.zero_grad()
            batch = make_rank_batch(
                tokenised(rows_of(case.rows, folder), tokenizer), world.rank, world.size, tokenizer, way
            )
            with Collectives() as counted:
                output, finite = backward(batch)
            assert finite
            grads = {n: p.grad.full_tensor() for n, p in encoder.named_parameters() if isinstance(p.grad, DTensor)}
            chunks = [(chunk.pictures is not None, bool(own_pictures(chunk))) for chunk in batch.chunks]
            answers.append((output.local_loss.item(), grads, chunks, counted.names))
    return answers


def own_pictures(chunk: Chunk) -> bool:
    return chunk.pictures is not None and len(chunk.pictures.rows) > 0


@pytest.mark.parametrize(
    ("world_size", "strategy", "cases", "reduce_per_step"),
    [
        (2, "fsdp", CASES[1:5], True),
        pytest.param(3, "fsdp", CASES, True, marks=pytest.mark.slow),
        pytest.param(4, "hsdp", CASES, False, marks=pytest.mark.slow),
        pytest.param(1, "fsdp", CASES, True, marks=pytest.mark.slow),
        pytest.param(2, "fsdp", [CASES[0], *CASES[5:]], True, marks=pytest.mark.slow),
        pytest.param(2, "ddp", CASES, False, marks=pytest.mark.slow),
        pytest.param(4, "hsdp", CASES, True, marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_one_process(ranks, folder, world_size, strategy, cases, reduce_per_step):
    """A rank without pictures, a batch without any, a frozen tower, adapters, and gradient caching."""
    # All classes have norms or rotations in float32, and the loss is multiplied by the number of ranks, which FSDP
    # divides gradients by: with a power of two that rounds to the same numbers.
    tolerance = 1e-6 if world_size == 3 else 1e-12
    by_rank = ranks(world_size, sharded_gradients, folder, cases, strategy, reduce_per_step)
    for number, case in enumerate(cases):
        loss, expected = plain_gradient(case, folder)
        for way in range(len(WAYS)):
            answers = [of_rank[number * len(WAYS) + way] for of_rank in by_rank]
            assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-12)
            grads = answers[0][1]
            assert grads.keys() == expected.keys(), case
            for name, grad in grads.items():
                # Gemma sums the gradient of a norm over tokens in float32.
                in_float32 = case.architecture == "paligemma" and "norm" in name
                allowed = (1e-6 if in_float32 else tolerance) * max(1.0, expected[name].norm().item())
                assert (grad - expected[name]).norm() <= allowed, (case, name)
            assert answers[0][3]
            assert all(answer[3] == answers[0][3] for answer in answers), "the same collectives on every rank"
            runs = [[runs for runs, _ in answer[2]] for answer in answers]
            assert all(of_rank == runs[0] for of_rank in runs), "the same passes with the vision tower on every rank"
            assert any(runs[0]) is (case.rows != "texts")
            if case.rows == "few" and world_size > 1:
                assert any((True, False) in answer[2] for answer in answers), "a rank without pictures has a dummy"


def encoded(world: World, folder: Path, unshard: str) -> list[torch.Tensor]:
    """Vectors of items with and without pictures, of texts alone, and of a single picture."""
    encoder, tokenizer = make_encoder(CASES[0])
    encoder.float()
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    layout = ParallelLayout(Strategy.fsdp, 1, world.size, "")
    shard_encoder(encoder, find_blocks(encoder), layout, parallel(), world.device)
    for name, tensor in encoder.state_dict().items():
        copy_local_rows(tensor, state[name])
    warm_up(encoder, Chunk.of_one_token(world.device))
    limit, costs = 60, list[list[int]]()
    make_chunk = tokenizer.make_chunk

    def counted(tokens: Tokens, rows: Sequence[int]) -> Chunk:
        costs.append(tokenizer.layout.chunk_costs(tokens).tolist())
        return make_chunk(tokens, rows)

    tokenizer.make_chunk = counted  # type: ignore[method-assign]
    texts = SentenceEncoder(encoder, tokenizer, world, chunk_tokens=limit, unshard=Unshard(unshard))
    some = [f"{text(i, 3)} {picture_item(folder, i)}" if i % 3 == 0 else text(i, 2 + i) for i in range(10)]
    vectors = [texts.encode_all(items) for items in (some, [text(1, 3)], [picture_item(folder, 1)])]
    assert all(sum(chunk) <= limit or len(chunk) == 1 for chunk in costs), "the tower counts, as in training"
    return vectors


@pytest.mark.quick("layer")
@pytest.mark.parametrize("unshard", ["layer", "model"])
def test_vectors_do_not_depend_on_the_number_of_ranks(ranks, folder, unshard):
    alone, *_ = ranks(1, encoded, folder, unshard)
    for of_rank in ranks(3, encoded, folder, unshard):
        assert all(torch.equal(vectors, expected) for vectors, expected in zip(of_rank, alone, strict=True))
