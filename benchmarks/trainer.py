"""The complete SentenceTransformerTrainer: after each of its steps, our step runs on the same batch and process."""

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

from benchmarks.comparison import (
    OPTIM,
    SCALE,
    TOLERANCE,
    Batches,
    OurSteps,
    StepResults,
    comparison_cells,
    padding_factor,
)
from benchmarks.inputs import MINILM, disable_dropout, load_minilm
from benchmarks.measure import ROUNDS, Timed, seconds
from benchmarks.workloads import Workload
from embedtrain.config.recipe import Precision
from embedtrain.data.train_data import TrainData
from embedtrain.distributed.world import World
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.rank_batch import ChunkOptions


def trainer_row(world: World, workload: Workload, options: ChunkOptions) -> list[str]:
    """A row of the table: `trainer.train()` in fp32, including its loader, callbacks and bookkeeping."""
    model = load_minilm(world, Precision.fp32)
    data = workload.data(ROUNDS + 1, model.tokenizer)
    theirs = SentenceTransformer(MINILM, device=str(world.device))
    theirs.max_seq_length = workload.max_length
    disable_dropout(theirs)
    ours = OurSteps(model, world, Batches(data, steps=1, rounds=ROUNDS + 1), options)
    callback = OurStepCallback(ours)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),  # progress bars
    ):
        _trainer(theirs, workload, data, callback, folder).train()
    cells = comparison_cells(
        "training, complete trainer", callback.ours[1:], callback.theirs[1:], TOLERANCE[Precision.fp32]
    )
    names = [f"{workload.num_pairs} pairs, {workload.name}", "fp32", "fp32, complete trainer", *cells]
    return [*names, padding_factor(callback.ours[1:]), padding_factor(callback.theirs[1:])]


class OurStepCallback(TrainerCallback):  # type: ignore[misc]
    """Measures their time between the ends of two steps, without our step in between; the first step warms up."""

    def __init__(self, our_step: OurSteps) -> None:
        self.our_step = our_step
        self.ours: list[Timed[StepResults]] = []
        self.theirs: list[Timed[StepResults]] = []
        self.results = StepResults((), 0, 0)
        self.start = 0.0

    def record(self, _loss: nn.Module, inputs: tuple[Any, ...], loss: Any) -> None:
        """Record token counts and the loss: forward hook of the loss module."""
        masks = [features["attention_mask"] for features in inputs[0]]
        real, computed_tokens = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
        self.results = StepResults((float(loss),), real, computed_tokens)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock of their first step."""
        self.start = seconds()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock of their step, and run ours."""
        end = seconds()
        self.theirs.append(Timed(self.results, end - self.start))
        results = self.our_step(len(self.ours) + 1)
        self.start = seconds()
        self.ours.append(Timed(results, self.start - end))


class SequentialBatchSampler(DefaultBatchSampler):  # type: ignore[misc]
    """Batches of consecutive rows."""

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        super().__init__(range(len(dataset)), **options)  # any iterable of row indices is a sampler


def _trainer(
    model: SentenceTransformer, workload: Workload, data: TrainData, callback: OurStepCallback, folder: str
) -> SentenceTransformerTrainer:
    rows = [row for step in range(ROUNDS + 1) for row in data.batch(step).rows]
    loss = MultipleNegativesRankingLoss(model, scale=SCALE)
    loss.register_forward_hook(callback.record)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=folder,
        max_steps=ROUNDS + 1,
        per_device_train_batch_size=workload.num_pairs,
        batch_sampler=SequentialBatchSampler,
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
        train_dataset=Dataset.from_list([{"anchor": row.query, "positive": row.documents.texts[0]} for row in rows]),
        loss=loss,
        callbacks=[callback],
        optimizers=(build_optimizer(model, OPTIM), None),
    )
