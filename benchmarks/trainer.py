"""SentenceTransformerTrainer itself, whole: after each of its steps our step on the same batch, in the same process."""

import contextlib
import io
import tempfile
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers import TrainerCallback

from benchmarks.inputs import MINILM, minilm, without_dropout
from benchmarks.measure import ROUNDS, Timed, seconds
from benchmarks.sides import OPTIM, SCALE, TOLERANCE, Batches, OurSteps, Took, compared, computed
from benchmarks.workloads import Workload
from embedtrain.config.recipe import Precision
from embedtrain.data.train_data import TrainData
from embedtrain.distributed.world import World
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.rank_batch import ChunkOptions


def their_trainer(world: World, workload: Workload, cutting: ChunkOptions) -> list[str]:
    """A row of the table: `trainer.train()` in fp32, its loader, its callbacks and its bookkeeping included."""
    model = minilm(world, Precision.fp32)
    data = workload.data(ROUNDS + 1, model.tokenizer)
    theirs = SentenceTransformer(MINILM, device=str(world.device))
    theirs.max_seq_length = workload.max_length
    without_dropout(theirs)
    ours = OurSteps(model, world, Batches(data, steps=1, rounds=ROUNDS + 1), cutting)
    turns = InTurns(ours)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),  # bars of progress
    ):
        _trainer(theirs, workload, data, turns, folder).train()
    cells = compared("training, the whole trainer", turns.ours[1:], turns.theirs[1:], TOLERANCE[Precision.fp32])
    told = [f"{workload.num_pairs} pairs, {workload.name}", "fp32", "fp32, its whole trainer", *cells]
    return [*told, computed(turns.ours[1:]), computed(turns.theirs[1:])]


class InTurns(TrainerCallback):  # type: ignore[misc]
    """Takes the time between two of its steps' ends, less our own step in between; the first step warms up."""

    def __init__(self, our_step: OurSteps) -> None:
        self.our_step = our_step
        self.ours: list[Timed[Took]] = []
        self.theirs: list[Timed[Took]] = []
        self.seen = Took((), 0, 0)
        self.began = 0.0

    def watch(self, _loss: nn.Module, given: tuple[Any, ...], loss: Any) -> None:
        """Note what its loss was given, and was: the hook of a module."""
        masks = [features["attention_mask"] for features in given[0]]
        real, padded = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
        self.seen = Took((float(loss),), real, padded)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Its first step begins."""
        self.began = seconds()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Its step is over; now ours."""
        ended = seconds()
        self.theirs.append(Timed(self.seen, ended - self.began))
        took = self.our_step(len(self.ours) + 1)
        self.began = seconds()
        self.ours.append(Timed(took, self.began - ended))


class InOrder(DefaultBatchSampler):  # type: ignore[misc]
    """Its batches, row after row."""

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        super().__init__(range(len(dataset)), **options)  # a sampler is whatever gives numbers of rows


def _trainer(
    model: SentenceTransformer, workload: Workload, data: TrainData, turns: InTurns, folder: str
) -> SentenceTransformerTrainer:
    rows = [row for step in range(ROUNDS + 1) for row in data.batch(step).rows]
    loss = MultipleNegativesRankingLoss(model, scale=SCALE)
    loss.register_forward_hook(turns.watch)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=folder,
        max_steps=ROUNDS + 1,
        per_device_train_batch_size=workload.num_pairs,
        batch_sampler=InOrder,
        learning_rate=OPTIM.lr,
        lr_scheduler_type="constant",
        max_grad_norm=OPTIM.max_grad_norm,
        use_cpu=model.device.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
    )
    return SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list([{"anchor": row.query, "positive": row.documents[0]} for row in rows]),
        loss=loss,
        callbacks=[turns],
        optimizers=(build_optimizer(model, OPTIM), None),
    )
