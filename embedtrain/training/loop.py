"""The training loop: steps, and between them logging, evaluation and checkpoints."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from embedtrain.checkpoint.store import Checkpoints
from embedtrain.config.schema import Recipe
from embedtrain.data.batches import TrainData
from embedtrain.data.tokens import TextTokenizer
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.batches import Prefetcher, RankBatch, cut
from embedtrain.training.state import as_dict
from embedtrain.training.step import StepReport, Trainable, train_step

Figures = dict[str, dict[str, float]]


@dataclass(kw_only=True)
class Loop:
    """Everything the loop goes round with. Every rank runs it alike."""

    recipe: Recipe
    run: Trainable
    data: TrainData
    tokenizer: TextTokenizer
    checkpoints: Checkpoints
    evaluate: Callable[[], Figures]
    best: tuple[str, str] | None  # set and metric by which a step is the best
    tracker: Tracker
    total_steps: int

    def go(self) -> None:
        """Train from where the state stands to the last step."""
        state, recipe = self.run.state, self.recipe
        each = recipe.train.accumulation
        batches = Prefetcher(self._batch, state.step * each, self.total_steps * each)
        since = _SinceLastLog()
        with self.tracker.training(self.total_steps, state.step), contextlib.closing(iter(batches)) as stream:
            if state.step == 0 and recipe.evaluation.at_start:
                self._evaluate()
            while state.step < self.total_steps:
                report = train_step(self.run, *itertools.islice(stream, each))
                since.add(report, batches.take_waited())
                last = state.step == self.total_steps
                self.tracker.advance(state.step)
                if last or state.step % recipe.train.log_every == 0:
                    self.tracker.step(since.row(state.step, report))
                    since = _SinceLastLog()
                improved = False
                if last or _due(state.step, recipe.evaluation.every):
                    improved = self._evaluate()
                if last or improved or _due(state.step, recipe.checkpoint.every):
                    self.save()

    def save(self) -> None:
        """Write a checkpoint of the present step."""
        self.run.state.wandb_id = self.run.world.broadcast(self.tracker.wandb_id)
        self.checkpoints.save(self.run.trained, self.run.optimizer, as_dict(self.run.state))

    def _batch(self, number: int) -> RankBatch:
        world, train = self.run.world, self.recipe.train
        guides = {path: guide.texts for path, guide in self.run.backward.guides.items()}
        return cut(
            self.data.batch(number),
            world.rank,
            world.size,
            self.tokenizer,
            train.chunk_tokens,
            train.keep_tokens,
            guides=guides,
            teacher_dimension=self.data.teacher_dimension,
        )

    def _evaluate(self) -> bool:
        """Measure, tell, and say whether this is the best step so far by `checkpoint.best`."""
        figures = self.evaluate()
        if not figures:
            return False
        state = self.run.state
        self.tracker.evaluation(state.step, figures)
        if self.best is None or state.step == 0:  # step 0 has no checkpoint to keep
            return False
        name, metric = self.best
        value = figures[name][metric]
        if state.best is not None and value <= state.best:
            return False
        state.best, state.best_step = value, state.step
        return True


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass
class _SinceLastLog:
    """Throughput over the steps since the last logged one; evaluation and saving are not counted."""

    reports: list[StepReport] = field(default_factory=list)
    waited: float = 0.0

    def add(self, report: StepReport, waited: float) -> None:
        self.reports.append(report)
        self.waited += waited

    def row(self, step: int, report: StepReport) -> dict[str, float]:
        seconds = sum(r.seconds for r in self.reports) + self.waited
        real = sum(r.real_tokens for r in self.reports)
        return {
            "step": step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            **report.measures,
            "samples_per_s": sum(r.num_rows for r in self.reports) / seconds,
            "tokens_per_s": real / seconds,
            "padding": 1.0 - real / max(1, sum(r.computed_tokens for r in self.reports)),
            "data_wait": self.waited / seconds,
        }
