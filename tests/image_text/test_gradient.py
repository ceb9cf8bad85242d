"""The gradient of towers of texts and pictures is that of the same global batch in one process, in float64.

The reference encodes every item alone, unsharded and padded, and computes the textbook loss.
"""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import LoraConfig, Strategy
from embedtrain.data.rows import Documents, Example
from embedtrain.data.types import Chunk, GlobalBatch
from embedtrain.distributed import sharding
from embedtrain.distributed.sharding import ParallelLayout, copy_local_rows, shard_encoder, warm_up
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import model_tokenizer
from embedtrain.kinds.image_text.options import ImageTextTower
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.adapters import add_adapters, base_name
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import enable_packing
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.image_text.models import NAMES, image_text, picture_item, save_image_text
from tests.small import Collectives, parallel, text, tokenised

TEMPERATURE = 0.2
# One chunk of each tower, and chunks of which the first keeps its graph and the others are encoded twice.
WAYS = [ChunkOptions(10_000, pass_overhead_tokens=10_000), ChunkOptions(40, 60, pass_overhead_tokens=4)]
FROZEN = ImageTextTower(frozen=True)
LORA = LoraConfig(rank=2, targets=["text.q_proj", "image.all-linear"])


@dataclass(frozen=True)
class Case:
    model: str
    rows: str = "mixed"
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    *(Case(name) for name in NAMES),
    Case("clip", "few"),
    Case("siglip", "texts"),
    Case("clip", "repeated"),
    Case("siglip2", options={"image": FROZEN}),
    Case("clip", options={"lora": LORA}),
]
MORE_CASES = [
    *CASES,
    Case("clip", "texts"),
    Case("clip", options={"image": FROZEN}),
    Case("siglip", options={"lora": replace(LORA, targets="all-linear"), "text": FROZEN}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_text")
    for name in NAMES:
        save_image_text(name, folder)
    for seed in range(12):
        picture_item(folder, seed)
    shutil.copy(folder / "picture_0.png", folder / "picture_50.png")
    return folder


def rows_of(kind: str, folder: Path) -> GlobalBatch:
    """Captions with their picture, pictures with their caption, and hard negatives of both."""
    if kind == "texts":
        return GlobalBatch(0, tuple(Example(text(i, 2 + i), Documents((text(9 + i, 3),))) for i in range(3)))
    if kind == "repeated":  # a picture of two captions, in two files of equal bytes, and a caption of two pictures
        captions = [text(0, 3), text(1, 4), text(2, 2), text(2, 2)]
        pictures = [picture_item(folder, seed) for seed in (0, 50, 1, 2)]
        assert pictures[0] == pictures[1]
        return GlobalBatch(0, tuple(Example(c, Documents((p,))) for c, p in zip(captions, pictures, strict=True)))
    pairs = [(text(i, 1 + i), picture_item(folder, i)) for i in range(2 if kind == "few" else 5)]
    rows = [Example(caption, Documents((picture,))) for caption, picture in pairs]
    if kind == "mixed":
        rows += [
            Example(picture_item(folder, 7), Documents((text(20, 6), text(21, 2), picture_item(folder, 8)))),
            Example(text(22, 3), Documents((picture_item(folder, 9), picture_item(folder, 10)))),
        ]
    return GlobalBatch(0, tuple(rows))


def make_encoder(case: Case, folder: Path) -> tuple[Encoder, Any]:
    """An encoder in float64 with its adapters, and the tokenizer."""
    source = open_model_source(image_text(folder / case.model, **case.options))
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    if "lora" in case.options:
        add_adapters(encoder, case.options["lora"], None, torch.float32)
        torch.manual_seed(5)
        for name, parameter in encoder.named_parameters():
            if base_name(name) is None:
                parameter.data.normal_(std=0.1)
    return encoder.double().eval(), model_tokenizer(source)


def plain_gradient(case: Case, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    encoder, tokenizer = make_encoder(case, folder)
    batch = rows_of(case.rows, folder)

    def vector(item: str) -> torch.Tensor:
        return encoder(tokenizer.chunk(tokenizer.tokens([item]), [0]))[0][0]

    queries = torch.stack([vector(row.query) for row in batch.rows])
    documents = torch.stack([vector(item) for row in batch.rows for item in row.documents.texts])
    firsts = torch.tensor([len(row.documents.texts) for row in batch.rows]).cumsum(0)
    positives = torch.cat([torch.zeros(1, dtype=torch.int64), firsts[:-1]])
    scores = queries @ documents.T / TEMPERATURE
    loss = F.cross_entropy(scores.masked_fill(~are_candidates(batch), -torch.inf), positives)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def are_candidates(batch: GlobalBatch) -> torch.Tensor:
    """Whether each document is the positive of a row, or neither equal to it nor the positive of an equal query."""
    owned = [(number, item) for number, row in enumerate(batch.rows) for item in row.documents.texts]
    firsts = [row.documents.texts[0] for row in batch.rows]
    rows = []
    for number, row in enumerate(batch.rows):
        known = {firsts[other] for other, same in enumerate(batch.rows) if same.query == row.query}
        own = owned.index((number, firsts[number]))
        rows.append([place == own or item not in known for place, (_, item) in enumerate(owned)])
    return torch.tensor(rows)


@patch.object(sharding, "_precision", lambda _: MixedPrecisionPolicy())  # ranks are used again
def sharded_gradients(world: World, folder: Path, cases: list[Case], strategy: str, reduce_per_step: bool) -> Any:
    """Of each case and way: the local loss, the whole gradients, the chunks of this rank, and its collectives."""
    answers = []
    for case in cases:
        encoder, tokenizer = make_encoder(case, folder)
        state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        blocks = find_blocks(encoder)
        shard = {"ddp": 1, "hsdp": 2}.get(strategy, world.size)
        layout = ParallelLayout(Strategy(strategy), world.size // shard, shard, "", activation_checkpointing=True)
        packs = "clip" in case.model or case.model == "pair"
        if packs:
            enable_packing(encoder)
        shard_encoder(encoder, blocks, layout, parallel(), world.device)
        for name, tensor in encoder.state_dict().items():
            copy_local_rows(tensor, state[name])
        warm_up(encoder, Chunk.of_one_token(world.device))
        tokenizer = tokenizer.with_packing(packs)
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
            chunks = [(chunk.tower, not chunk.is_dummy) for chunk in batch.chunks]
            answers.append((output.local_loss.item(), grads, chunks, counted.names))
    return answers


@pytest.mark.parametrize(
    ("world_size", "strategy", "cases", "reduce_per_step"),
    [
        (2, "fsdp", CASES[-2:], True),
        (3, "fsdp", [Case("clip", "few"), Case("clip", "repeated")], True),
        pytest.param(3, "fsdp", CASES, True, marks=pytest.mark.slow),
        *(
            pytest.param(size, strategy, MORE_CASES, per_step, marks=pytest.mark.slow)
            for size, strategy, per_step in (
                (1, "fsdp", True),
                (2, "fsdp", True),
                (3, "fsdp", False),
                (2, "ddp", False),
                (4, "hsdp", False),
            )
        ),
    ],
)
def test_gradient_equals_one_process(ranks, folder, world_size, strategy, cases, reduce_per_step):
    """A rank without pictures, batches without any, frozen towers, adapters rooted at a tower, and gradient caching."""
    by_rank = ranks(world_size, sharded_gradients, folder, cases, strategy, reduce_per_step)
    for number, case in enumerate(cases):
        loss, expected = plain_gradient(case, folder)
        for way in range(len(WAYS)):
            answers = [of_rank[number * len(WAYS) + way] for of_rank in by_rank]
            assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-12)
            grads = answers[0][1]
            assert grads.keys() == expected.keys(), case
            for name, grad in grads.items():
                assert (grad - expected[name]).norm() <= 1e-12 * max(1.0, expected[name].norm().item()), (case, name)
            assert answers[0][3]
            assert all(answer[3] == answers[0][3] for answer in answers), "the same collectives on every rank"
            towers = [[tower for tower, _ in answer[2]] for answer in answers]
            assert all(of_rank == towers[0] for of_rank in towers), "the same towers in the same order on every rank"
            if case.rows == "few" and world_size == 3:
                assert any((1, False) in answer[2] for answer in answers), "a rank without pictures computes a dummy"
            assert (1 in towers[0]) is (case.rows != "texts")
