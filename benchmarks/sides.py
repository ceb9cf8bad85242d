"""The two sides of a training comparison: our step, and sentence-transformers' own on the same batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from benchmarks.inputs import without_dropout
from benchmarks.measure import ROUNDS, Timed, ratio, require, speed
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import OptimConfig, Precision, ScheduleKind
from embedtrain.data.train_data import TrainData
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.loading.load import LoadedModel
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from embedtrain.training.state import EncoderWithLoss, TrainState
from embedtrain.training.step import StepContext, train_step

T = TypeVar("T")

SCALE = 20.0
OPTIM = OptimConfig(lr=2e-5, weight_decay=0.01, max_grad_norm=1.0, schedule=ScheduleKind.constant, warmup=0)
# How far losses may be apart. In bf16 a vector has three digits, and the scale makes differences of cosines larger.
TOLERANCE = {Precision.fp32: 1e-5, Precision.bf16: 2e-2}


@dataclass(frozen=True, slots=True)
class Took:
    """What the steps of a round did: the loss of each, and the tokens of all, real and with padding."""

    losses: tuple[float, ...]
    real: int
    computed: int


Side = Callable[[int], Took]
Features = dict[str, Tensor]
Rounds = Sequence[Timed[Took]]


@dataclass(frozen=True, slots=True)
class Batches:
    """Some batches for each round, the same for all sides; round 0 warms up on one batch."""

    data: TrainData
    steps: int
    rounds: int = ROUNDS

    def __call__(self, number: int) -> list[GlobalBatch]:
        """Those of round `number`."""
        if not number:
            return [self.data.batch(0)]
        return [self.data.batch(step) for step in range((number - 1) * self.steps, number * self.steps)]

    def each(self, make: Callable[[GlobalBatch], T]) -> list[list[T]]:
        """What `make` makes of every batch of every round: ahead of time, as loaders do beside the steps."""
        return [[make(batch) for batch in self(number)] for number in range(self.rounds + 1)]


class OurSteps:
    """`train_step` on the batches of a round, whose chunks are cut ahead.

    Args:
        model: all of it is trained.
        world: the one rank.
        batches: of each round.
        cutting: how they are cut.
        keep: the share of a batch's tokens whose graphs are kept.
    """

    def __init__(
        self, model: LoadedModel, world: World, batches: Batches, cutting: ChunkOptions, keep: float = 1.0
    ) -> None:
        self.run = trainable(model, world)

        def chunks(batch: GlobalBatch) -> RankBatch:
            tokens = make_rank_batch(batch, 0, 1, model.tokenizer, cutting).computed_tokens
            return make_rank_batch(batch, 0, 1, model.tokenizer, replace(cutting, activation_tokens=int(keep * tokens)))

        self.ready = batches.each(chunks)

    def __call__(self, number: int) -> Took:
        """Take the steps of round `number`."""
        reports = [train_step(self.run, batch) for batch in self.ready[number]]
        real, computed = (sum(getattr(one, f"{kind}_tokens") for one in reports) for kind in ("real", "computed"))
        return Took(tuple(report.loss for report in reports), real, computed)


class TheirSteps:
    """What sentence-transformers' trainer does in a step, without the trainer around it; texts are tokenised ahead.

    Args:
        model: all of it is trained.
        loss: its loss, of `model`.
        precision: bf16 is what its trainer does with `bf16=True`: autocast around the forward pass and the loss.
        batches: of each round.
    """

    def __init__(self, model: SentenceTransformer, loss: nn.Module, precision: Precision, batches: Batches) -> None:
        self.model, self.loss = model, loss
        without_dropout(model)
        model.train()
        self.optimizer = build_optimizer(model, OPTIM)
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=precision is Precision.bf16)
        self.ready = batches.each(self._features)

    def __call__(self, number: int) -> Took:
        """Take the steps of round `number`."""
        losses = tuple(self._step([_to(one, self.model.device) for one in batch]) for batch in self.ready[number])
        masks = [one["attention_mask"] for batch in self.ready[number] for one in batch]
        return Took(losses, sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks))

    def _features(self, batch: GlobalBatch) -> list[Features]:
        columns = [[row.query for row in batch.rows], [row.documents[0] for row in batch.rows]]
        found = [self.model.preprocess(texts) for texts in columns]
        return [{key: value for key, value in one.items() if torch.is_tensor(value)} for one in found]

    def _step(self, features: list[Features]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = self.loss(features, None)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm or 0.0)
        self.optimizer.step()
        return float(loss)


def _to(features: Features, device: torch.device) -> Features:
    return {key: value.to(device, non_blocking=True) for key, value in features.items()}


def trainable(model: LoadedModel, world: World, optim: OptimConfig = OPTIM) -> StepContext:
    """What `train_step` needs, dropout off."""
    without_dropout(model.encoder)
    optimizer = build_optimizer(model.encoder, optim)
    loss = InfoNCE(InfoNCEConfig(temperature=1 / SCALE))
    return StepContext(
        world=world,
        module=EncoderWithLoss(model.encoder, loss),
        optimizer=optimizer,
        schedule=Schedule(optimizer, optim, total_steps=1),
        backward=Backward(model.encoder, loss, world, seed=0, dummy=model.tokenizer.dummy()),
        optim=optim,
        state=TrainState(),
    )


def compared(what: str, ours: Rounds, theirs: Rounds, tolerance: float) -> list[str]:
    """Cells of a table: speed of both, ratio, how far losses are apart at most.

    Raises:
        WrongResult: losses are further apart than `tolerance` in any step, or tokens were counted otherwise.
    """
    pairs = [(a.value, b.value) for a, b in zip(ours, theirs, strict=True)]
    apart = max(abs(x - y) for a, b in pairs for x, y in zip(a.losses, b.losses, strict=True))
    require(apart <= tolerance, f"{what}: losses are {apart} apart, which is more than {tolerance}: {pairs}")
    require(all(a.real == b.real for a, b in pairs), f"{what}: not the same tokens: {pairs}")
    tokens = [a.real for a, _ in pairs]
    return [f"{speed(ours, tokens):,.0f}", f"{speed(theirs, tokens):,.0f}", ratio(ours, theirs), f"{apart:.0e}"]


def computed(rounds: Rounds) -> str:
    """Tokens computed for each real one."""
    return f"{median(one.value.computed / one.value.real for one in rounds):.2f}"
