"""The two sides of a training comparison: our step, and sentence-transformers' own on the same batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from benchmarks.inputs import without_dropout
from benchmarks.measure import Timed, ratio, require, speed
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.schema import OptimConfig, Precision, ScheduleKind
from embedtrain.data.batches import TrainData
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.losses.infonce import InfoNCE
from embedtrain.training.batches import Cutting, cut
from embedtrain.training.gradients import Backward
from embedtrain.training.model import LoadedModel
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.state import TrainState
from embedtrain.training.step import StepReport, Trainable, train_step
from embedtrain.training.trained import Trained

SCALE = 20.0
OPTIM = OptimConfig(lr=2e-5, weight_decay=0.01, max_grad_norm=1.0, schedule=ScheduleKind.constant, warmup=0)
# How far losses may be apart. In bf16 a vector has three digits, and the scale makes differences of cosines larger.
TOLERANCE = {Precision.fp32: 1e-5, Precision.bf16: 5e-2}
_FEW = 8  # rows of the step that warms up


@dataclass(frozen=True, slots=True)
class Took:
    """What the steps of a round did: the loss of each, and the tokens of all, real and with padding."""

    losses: tuple[float, ...]
    real: int
    computed: int


Side = Callable[[int], Took]
Rounds = Sequence[Timed[Took]]


@dataclass(slots=True)
class Batches:
    """Some batches for each round, the same for all sides; round 0, which warms up, has a few rows."""

    data: TrainData
    steps: int

    def __call__(self, number: int) -> list[GlobalBatch]:
        """Those of round `number`."""
        if not number:
            return [GlobalBatch(0, self.data.batch(0).rows[:_FEW])]
        return [self.data.batch(step) for step in range((number - 1) * self.steps, number * self.steps)]


@dataclass(slots=True)
class OurSteps:
    """`train_step` on the batches of a round; `keep` is the share of their tokens whose graphs are kept."""

    run: Trainable
    model: LoadedModel
    batches: Batches
    cutting: Cutting
    keep: float = 1.0

    def __call__(self, number: int) -> Took:
        """Take the steps of round `number`."""
        reports = [self._step(batch) for batch in self.batches(number)]
        real, computed = (sum(getattr(one, f"{kind}_tokens") for one in reports) for kind in ("real", "computed"))
        return Took(tuple(report.loss for report in reports), real, computed)

    def _step(self, batch: GlobalBatch) -> StepReport:
        tokens = cut(batch, 0, 1, self.model.tokenizer, self.cutting).computed_tokens
        cutting = replace(self.cutting, keep_tokens=int(self.keep * tokens))
        return train_step(self.run, cut(batch, 0, 1, self.model.tokenizer, cutting))


class TheirSteps:
    """What sentence-transformers' trainer does in a step, without the trainer around it.

    Args:
        model: all of it is trained.
        loss: its loss, of `model`.
        precision: bf16 is what its trainer does with `bf16=True`: autocast around the forward pass and the loss.
        batches: of each round.
    """

    def __init__(self, model: SentenceTransformer, loss: nn.Module, precision: Precision, batches: Batches) -> None:
        self.model, self.loss, self.batches = model, loss, batches
        without_dropout(model)
        model.train()
        self.optimizer = build_optimizer(model, OPTIM)
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=precision is Precision.bf16)

    def __call__(self, number: int) -> Took:
        """Take the steps of round `number`."""
        losses, real, computed = [], 0, 0
        for batch in self.batches(number):
            features = self._features(batch)
            losses.append(self._step(features))
            masks = [one["attention_mask"] for one in features]
            real += sum(int(mask.sum()) for mask in masks)
            computed += sum(mask.numel() for mask in masks)
        return Took(tuple(losses), real, computed)

    def _features(self, batch: GlobalBatch) -> list[dict[str, Tensor]]:
        columns = [[row.query for row in batch.rows], [row.documents[0] for row in batch.rows]]
        return [
            {
                key: value.to(self.model.device)
                for key, value in self.model.preprocess(texts).items()
                if torch.is_tensor(value)
            }
            for texts in columns
        ]

    def _step(self, features: list[dict[str, Tensor]]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = self.loss(features, None)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm or 0.0)
        self.optimizer.step()
        return float(loss)


def trainable(model: LoadedModel, world: World, optim: OptimConfig = OPTIM) -> Trainable:
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
