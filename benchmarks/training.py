"""A training step beside sentence-transformers': from texts to changed weights, tokenising included."""

from collections.abc import Callable

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn

from benchmarks.inputs import MINILM, minilm, precisions, train_data, without_dropout
from benchmarks.measure import interleave, markdown, require, speeds, unit
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.schema import OptimConfig, Precision, ScheduleKind
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World, joined_world
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.batches import Cutting, cut
from embedtrain.training.gradients import Backward
from embedtrain.training.model import LoadedModel
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.state import TrainState
from embedtrain.training.step import Trainable, train_step
from embedtrain.training.trained import Trained

PAIRS = 64
SCALE = 20.0
TITLE = f"A training step, {PAIRS} pairs, all-MiniLM-L6-v2, against sentence-transformers"
OPTIM = OptimConfig(lr=2e-5, weight_decay=0.01, max_grad_norm=1.0, schedule=ScheduleKind.constant, warmup=0)
# Tokens whose graphs are kept; the second is about what sentence-transformers' default of 32 texts holds.
WHOLE, CACHED = 16384, 2048
TOLERANCE = {Precision.fp32: 1e-5, Precision.bf16: 2e-2}

MakeLoss = Callable[[SentenceTransformer], nn.Module]


def measure() -> str:
    cases: list[tuple[str, int, MakeLoss]] = [
        ("MultipleNegativesRankingLoss", WHOLE, lambda model: MultipleNegativesRankingLoss(model, scale=SCALE)),
        (
            "CachedMultipleNegativesRankingLoss, mini_batch_size=32",
            CACHED,
            lambda model: CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=32),
        ),
    ]
    rows = []
    with joined_world() as world:
        for precision in precisions():
            rows += [_row(world, precision, *case) for case in cases]
    per_s = f"real tokens / {unit()}"
    return markdown(
        ["against", "train.chunk_tokens", "precision", f"ours, {per_s}", f"theirs, {per_s}", "ratio", "loss apart"],
        rows,
    )


def _row(world: World, precision: Precision, name: str, chunk_tokens: int, make_loss: MakeLoss) -> list[object]:
    model = minilm(world, precision)
    data = train_data(PAIRS, model.tokenizer)
    run = trainable(model, world, OPTIM)
    theirs = TheirStep(world.device, make_loss, precision)
    tokens: list[int] = []

    def batch(number: int) -> GlobalBatch:
        whole = data.batch(number)
        return whole if number else GlobalBatch(0, whole.rows[:8])

    def our_step(number: int) -> float:
        report = train_step(run, cut(batch(number), 0, 1, model.tokenizer, Cutting(chunk_tokens)))
        tokens.append(report.real_tokens)
        return report.loss

    ours, others = interleave(our_step, lambda number: theirs(batch(number)))
    apart = max(abs(a.value - b.value) for a, b in zip(ours, others, strict=True))
    require(apart <= TOLERANCE[precision], f"training, {name}: losses are {apart} apart")
    return [name, chunk_tokens, precision.value, *speeds(ours, others, tokens[1:]), f"{apart:.0e}"]


def trainable(model: LoadedModel, world: World, optim: OptimConfig) -> Trainable:
    """What `train_step` needs, dropout off."""
    without_dropout(model.encoder)
    optimizer = build_optimizer(model.encoder, optim)
    loss = InfoNCE(InfoNCEConfig(temperature=1 / SCALE))
    return Trainable(
        world=world,
        trained=Trained(model.encoder, loss),
        optimizer=optimizer,
        schedule=Schedule(optimizer, optim, total_steps=1),
        backward=Backward(model.encoder, loss, world, seed=0, dummy=model.tokenizer.dummy()),
        optim=optim,
        state=TrainState(),
    )


class TheirStep:
    """What sentence-transformers' trainer does in a step, without the trainer around it: call it with a batch."""

    def __init__(self, device: torch.device, make_loss: MakeLoss, precision: Precision) -> None:
        self.model = SentenceTransformer(MINILM, device=str(device))
        without_dropout(self.model)
        self.model.train()
        self.loss = make_loss(self.model)
        self.optimizer = build_optimizer(self.model, OPTIM)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision is Precision.bf16)

    def __call__(self, batch: GlobalBatch) -> float:
        """Take the step; return the loss before it."""
        columns = [[row.query for row in batch.rows], [row.documents[0] for row in batch.rows]]
        features = [
            {
                key: value.to(self.model.device)
                for key, value in self.model.preprocess(texts).items()
                if torch.is_tensor(value)
            }
            for texts in columns
        ]
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = self.loss(features, None)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm)
        self.optimizer.step()
        return float(loss)
