"""The gradient of a reranker of texts and pictures is that of the same global batch in one process, in float64.

The reference encodes every pair alone by transformers' own class, unsharded, and computes the textbook loss.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import BCEConfig, DistillScoresConfig, LossConfig, SoftmaxConfig
from embedtrain.config.recipe import Strategy
from embedtrain.data.images.item import has_pictures
from embedtrain.data.rows import Documents, Example
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, GlobalBatch, Pair
from embedtrain.distributed import sharding
from embedtrain.distributed.sharding import ParallelLayout, copy_local_rows, shard_encoder, warm_up
from embedtrain.distributed.world import World
from embedtrain.kinds.cross_encoder.model import PairFormat, PairTruncation
from embedtrain.kinds.cross_encoder.vision import TokenScoreHead, VisionPairLayout
from embedtrain.losses.build import build_loss
from embedtrain.losses.score import PairScore
from embedtrain.models.adapters import add_adapters, base_name
from embedtrain.models.blocks import find_blocks
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import enable_packing
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import make_rank_batch
from tests.image_text.models import picture_item
from tests.small import Collectives, parallel, small_tokenizer, text, tokenised
from tests.training import test_vision_gradient as items
from tests.training.test_vision_gradient import LORA, WAYS, own_pictures
from tests.vision_models import HIDDEN, class_features

FORMAT = PairFormat(before=(3, 4), between=(5,), after=(6, 7), truncation=PairTruncation.only_second)


@dataclass(frozen=True)
class Case:
    architecture: str
    loss: str = "softmax"
    rows: str = "mixed"
    frozen: bool = False
    lora: bool = False


CASES = [
    Case("qwen3_vl", "distill_scores"),
    Case("qwen3_vl", "softmax", "few", frozen=True),
    Case("qwen3_vl", "bce", "texts"),
    Case("qwen2_vl", "bce", lora=True),
    Case("qwen2_5_vl", "softmax", "few"),
    Case("idefics3", "distill_scores", "few"),
]
LOSSES: dict[str, LossConfig] = {
    "softmax": SoftmaxConfig(), "bce": BCEConfig(), "distill_scores": DistillScoresConfig(temperature=1.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for seed in range(8):
        picture_item(folder, seed)
    return folder


def rows_of(kind: str, folder: Path) -> GlobalBatch:
    """Rows of a query and three documents with scores; "few": one document has a picture."""
    one, two = picture_item(folder, 6), picture_item(folder, 7)
    rows = []
    for i in range(3):
        texts = [text(i, 3), f"{text(i + 5, 2)}", text(i + 9, 4 + i)]
        query = text(i, 2 + i)
        if kind == "few" and i == 0:
            texts[1] += one
        elif kind == "mixed":
            query = (f"{one}{query}", query, f"{query} {two}")[i]
            texts[0] = (picture_item(folder, i), f"{one} {texts[0]} {two}", texts[0])[i]
        rows.append(Example(query, Documents((texts[0],), (1.0,)), Documents(tuple(texts[1:]), (0.25, 0.0))))
    return GlobalBatch(0, tuple(rows))


def make_encoder(case: Case) -> tuple[Encoder, TextTokenizer]:
    """A reranker in float64, and the tokenizer."""
    base, tokenizer = items.make_encoder(items.Case(case.architecture, frozen=case.frozen))
    head = TokenScoreHead(HIDDEN)
    torch.manual_seed(3)
    assert head.in_float32 is not None
    head.in_float32.double()
    next(head.in_float32.parameters()).data.normal_(std=0.3)
    encoder = Encoder(base.backbone, head, vision=base.vision)
    enable_packing(encoder)
    if case.lora:
        add_adapters(encoder, LORA, None, torch.float64)
        torch.manual_seed(5)
        for name, parameter in encoder.named_parameters():
            if base_name(name) is None:
                parameter.data.normal_(std=0.1)
    layout = VisionPairLayout(tokenizer.layout, FORMAT)
    return encoder.eval(), TextTokenizer(small_tokenizer(), 200, layout, packed=True)


def plain_gradient(case: Case, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    encoder, tokenizer = make_encoder(case)
    weight = encoder.get_parameter("head.score.weight")

    def score(query: str, document: str) -> torch.Tensor:
        chunk = tokenizer.chunk(tokenizer.tokens([Pair(query, document)]), [0])
        assert ("pixels" in chunk.decoded) is has_pictures(query + document)
        return weight[0] @ class_features(case.architecture, encoder, chunk)

    rows = rows_of(case.rows, folder).rows
    scores = torch.stack([torch.stack([score(row.query, item) for item in row.documents.texts]) for row in rows])
    labels = torch.tensor([[1.0, 0.25, 0.0]] * len(rows), dtype=torch.float64)
    loss = {
        "softmax": lambda: F.cross_entropy(scores, torch.zeros(len(rows), dtype=torch.int64)),
        "bce": lambda: F.binary_cross_entropy_with_logits(scores, labels),
        "distill_scores": lambda: F.kl_div(scores.log_softmax(-1), labels.softmax(-1), reduction="batchmean"),
    }[case.loss]()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


@patch.object(sharding, "_precision", lambda _: MixedPrecisionPolicy())  # ranks are used again
def sharded_gradients(world: World, folder: Path, cases: list[Case], strategy: str) -> Any:
    """Of each case and way: the local loss, the gradients, whether chunks have pictures, and the collectives."""
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
        loss = build_loss(LOSSES[case.loss], dimension=1, seed=0, score=PairScore())
        backward = Backward(encoder, loss, world, seed=0, dummy=tokenizer.dummy())
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


@pytest.mark.parametrize(
    ("world_size", "strategy", "cases"),
    [
        (2, "fsdp", [CASES[1], CASES[3]]),
        pytest.param(1, "fsdp", CASES, marks=pytest.mark.slow),
        pytest.param(2, "fsdp", CASES, marks=pytest.mark.slow),
        pytest.param(3, "fsdp", CASES, marks=pytest.mark.slow),
        pytest.param(2, "ddp", CASES, marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_one_process(ranks, folder, world_size, strategy, cases):
    """Pointwise, listwise and distillation; a rank without pictures, none at all, a frozen tower, adapters, caching."""
    # See `test_vision_gradient`: with three ranks, FSDP divides by a number that is no power of two in float32.
    tolerance = 1e-6 if world_size == 3 else 1e-12
    by_rank = ranks(world_size, sharded_gradients, folder, cases, strategy)
    for number, case in enumerate(cases):
        loss, expected = plain_gradient(case, folder)
        assert "head.score.weight" in expected
        for way in range(len(WAYS)):
            answers = [of_rank[number * len(WAYS) + way] for of_rank in by_rank]
            assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-12)
            grads = answers[0][1]
            assert grads.keys() == expected.keys(), case
            for name, grad in grads.items():
                allowed = tolerance * max(1.0, expected[name].norm().item())
                assert (grad - expected[name]).norm() <= allowed, (case, name)
            assert all(answer[3] == answers[0][3] for answer in answers), "the same collectives on every rank"
            # A rank with one pair less may lack the last chunk, if it has no pictures.
            runs = [[number for number, (runs, _) in enumerate(answer[2]) if runs] for answer in answers]
            assert all(of_rank == runs[0] for of_rank in runs), "the same passes with the vision tower on every rank"
            assert bool(runs[0]) is (case.rows != "texts")
            if case.rows == "few" and world_size > 1:
                assert any((True, False) in answer[2] for answer in answers), "a rank without pictures has a dummy"
