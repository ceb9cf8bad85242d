"""Training steps to compare: ours, and those of sentence-transformers on the same batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from benchmarks.inputs import disable_dropout
from benchmarks.measure import ROUNDS, Timed, ratio, require, speed
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.optim import OptimConfig, ScheduleKind
from embedtrain.config.recipe import Precision
from embedtrain.data.train_data import TrainData
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import LoadedModel
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.types import Loss
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from embedtrain.training.state import EncoderWithLoss, TrainState
from embedtrain.training.step import StepContext, train_step

T = TypeVar("T")

SCALE = 20.0
OPTIM = OptimConfig(lr=2e-5, weight_decay=0.01, max_grad_norm=1.0, schedule=ScheduleKind.constant, warmup=0)
# Maximal difference of losses. In bf16 an embedding has three digits, and the scale multiplies differences of cosines.
TOLERANCE = {Precision.fp32: 1e-5, Precision.bf16: 2e-2}


@dataclass(frozen=True, slots=True)
class StepResults:
    """Steps of a round: the loss of each, and the tokens of all, real and computed (with padding)."""

    losses: tuple[float, ...]
    real: int
    computed: int


StepRunner = Callable[[int], StepResults]
Features = dict[str, Tensor]
Rounds = Sequence[Timed[StepResults]]


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of each round, equal for all implementations; round 0 warms up on one batch."""

    data: TrainData
    steps: int
    rounds: int = ROUNDS

    def __call__(self, round_number: int) -> list[GlobalBatch]:
        """The batches of a round."""
        if not round_number:
            return [self.data.batch(0)]
        return [self.data.batch(step) for step in range((round_number - 1) * self.steps, round_number * self.steps)]

    def prepare(self, function: Callable[[GlobalBatch], T]) -> list[list[T]]:
        """Apply `function` to the batches of all rounds in advance, as loaders do in the background."""
        return [[function(batch) for batch in self(number)] for number in range(self.rounds + 1)]


class OurSteps:
    """`train_step` on the batches of a round; chunks are built in advance.

    Args:
        model: model of which all weights are trained.
        world: a single rank.
        batches: batches of each round.
        options: chunk options.
        cached: fraction of a batch's tokens whose graphs are cached.
    """

    def __init__(
        self, model: LoadedModel, world: World, batches: Batches, options: ChunkOptions, cached: float = 1.0
    ) -> None:
        self.run = make_step_context(model, world)

        def chunks(batch: GlobalBatch) -> RankBatch:
            tokens = make_rank_batch(batch, 0, 1, model.tokenizer, options).computed_tokens
            made = make_rank_batch(
                batch, 0, 1, model.tokenizer, replace(options, activation_tokens=int(cached * tokens))
            )
            return prefetched(made, self.run, model)

        self.prepared = batches.prepare(chunks)

    def __call__(self, round_number: int) -> StepResults:
        """Run the steps of a round."""
        reports = [train_step(self.run, batch) for batch in self.prepared[round_number]]
        real, computed = (sum(getattr(report, f"{kind}_tokens") for report in reports) for kind in ("real", "computed"))
        return StepResults(tuple(report.loss for report in reports), real, computed)


class TheirSteps:
    """A step of sentence-transformers' trainer without the trainer; texts are tokenized in advance.

    Args:
        model: model of which all weights are trained.
        loss: a sentence-transformers loss of `model`.
        precision: bf16 runs the forward pass and the loss under autocast, as the trainer does with `bf16=True`.
        batches: batches of each round.
    """

    def __init__(self, model: SentenceTransformer, loss: nn.Module, precision: Precision, batches: Batches) -> None:
        self.model, self.loss = model, loss
        disable_dropout(model)
        model.train()
        self.optimizer = build_optimizer(model, OPTIM)
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=precision is Precision.bf16)
        self.prepared = batches.prepare(self._features)

    def __call__(self, round_number: int) -> StepResults:
        """Run the steps of a round."""
        losses = tuple(
            self._step([_to(column, self.model.device) for column in batch]) for batch in self.prepared[round_number]
        )
        masks = [column["attention_mask"] for batch in self.prepared[round_number] for column in batch]
        return StepResults(losses, sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks))

    def _features(self, batch: GlobalBatch) -> list[Features]:
        columns = [[row.query for row in batch.rows], [row.documents.texts[0] for row in batch.rows]]
        preprocessed = [self.model.preprocess(texts) for texts in columns]
        return [{key: value for key, value in features.items() if torch.is_tensor(value)} for features in preprocessed]

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


def make_step_context(
    model: LoadedModel, world: World, optim: OptimConfig = OPTIM, loss: Loss | None = None
) -> StepContext:
    """Disable dropout and build the context that `train_step` needs; the default loss is InfoNCE."""
    disable_dropout(model.encoder)
    optimizer = build_optimizer(model.encoder, optim)
    loss = loss or InfoNCE(InfoNCEConfig(temperature=1 / SCALE))
    return StepContext(
        module=EncoderWithLoss(model.encoder, loss),
        schedule=Schedule(optimizer, optim, total_steps=1),
        backward=Backward(model.encoder, loss, world, seed=0, dummy=model.tokenizer.dummy()),
        state=TrainState(),
    )


def prefetched(batch: RankBatch, run: StepContext, model: LoadedModel) -> RankBatch:
    """The batch as the prefetch thread of a run leaves it: what the loss needs is prepared, and pinned for a GPU."""
    batch = batch.prepared_for(run.backward.loss, model.encoder.dimension)
    return batch.pinned() if run.world.device.type == "cuda" else batch


def comparison_cells(label: str, ours: Rounds, theirs: Rounds, tolerance: float) -> list[str]:
    """Table cells: both speeds, their ratio, and the maximal difference of losses.

    Raises:
        WrongResult: losses of a step differ by more than `tolerance`, or token counts differ.
    """
    pairs = [(a.value, b.value) for a, b in zip(ours, theirs, strict=True)]
    difference = max(abs(x - y) for a, b in pairs for x, y in zip(a.losses, b.losses, strict=True))
    require(difference <= tolerance, f"{label}: losses differ by {difference}, more than {tolerance}: {pairs}")
    require(all(a.real == b.real for a, b in pairs), f"{label}: token counts differ: {pairs}")
    tokens = [a.real for a, _ in pairs]
    return [f"{speed(ours, tokens):,.0f}", f"{speed(theirs, tokens):,.0f}", ratio(ours, theirs), f"{difference:.0e}"]


def padding_factor(rounds: Rounds) -> str:
    """Computed tokens per real token."""
    return f"{median(timed.value.computed / timed.value.real for timed in rounds):.2f}"
