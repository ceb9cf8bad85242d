"""The training loop: steps, and between them logging, evaluation and checkpoints."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.step_directory import step_path
from embedtrain.config.loss_checks import guide_paths
from embedtrain.config.losses import LossConfig
from embedtrain.config.recipe import CheckpointContents, Recipe
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData
from embedtrain.distributed.collectives import max_over_ranks
from embedtrain.distributed.signals import Notice, StopSignals, exit_code
from embedtrain.distributed.timeouts import Timeouts
from embedtrain.distributed.watchdog.activity import set_activity
from embedtrain.errors import EvaluationInterrupted, Stopped
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.communication import CommunicationMeter
from embedtrain.training.garbage import automatic_collection, scheduled_collection
from embedtrain.training.matmul_rate import MatmulRate
from embedtrain.training.prefetch import Prefetcher
from embedtrain.training.profile import StepProfiler
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, cut
from embedtrain.training.spans import BATCHES, span
from embedtrain.training.state import as_dict
from embedtrain.training.step import StepContext, StepReport, train_step


@dataclass(kw_only=True)
class TrainingLoop:
    """Everything the loop goes round with. Every rank runs it alike."""

    recipe: Recipe
    run: StepContext
    data: TrainData
    losses: Sequence[LossConfig]  # of each source
    tokenizer: TextTokenizer
    cutting: ChunkOptions
    checkpoints: Checkpointer
    evaluator: Evaluator
    best: tuple[str, str] | None  # set and metric by which a step is the best
    tracker: Tracker
    total_steps: int
    total_batches: int  # the last step has what is left of them
    run_dir: RunDirectory
    stopping: StopSignals
    patience: Timeouts
    rate: MatmulRate  # what the model's rate is a share of
    _asked: bool = False  # to stop, on all ranks alike
    _saved: int = 0  # the step of the newest checkpoint; 0: none

    def go(self) -> Stopped | None:
        """Train from where the state stands to the last step, or to where nothing gets better any more.

        Returns:
            Why the run is to end here, if a signal asked for it; a checkpoint is written then.
        """
        self._saved = self.run.state.step
        if not self._over or self.run.state.evaluation_due:
            with self.stopping.deferred():
                self._train()
                if self._asked or self._agree_to_stop():
                    return self._stop()
        if self.run.state.step < self.total_steps:
            self.tracker.note(self._why_stopped())
        return None

    def save(self) -> None:
        """Write a checkpoint of the present step.

        Raises:
            TrainingError: on every rank alike, the output directory is no longer there.
        """
        self.patience.leave_steps()
        with self.run.world.fail_together("looking at the output directory"):
            if self.run.world.is_main:
                self.run_dir.require_exists()
        self._saved = self.run.state.step
        self.run.state.wandb_id = self.run.world.broadcast(self.tracker.wandb_id)
        self.checkpoints.save(self.run.trained, self.run.optimizer, as_dict(self.run.state))

    def _train(self) -> None:
        state, recipe = self.run.state, self.recipe
        each = recipe.train.gradient_accumulation_steps
        batches = Prefetcher(
            self._batch, state.step * each, self.total_batches, workers=recipe.data.workers, ahead=2 * each
        )
        communication = CommunicationMeter(self.run.world, recipe.train.log_every)
        profile = StepProfiler(recipe.tracking, self.run.world, self.run_dir.profile, self.tracker)
        profile.report_skipped_steps(state.step, self.total_steps)
        since = _SinceLastLog()
        with (
            self.tracker.training(self.total_steps, state.step),
            contextlib.closing(iter(batches)) as stream,
            scheduled_collection() as garbage,
            profile,
        ):
            if state.evaluation_due:  # left when the run was stopped; its checkpoint does not know what comes of it
                if self._evaluate() or (self._over and not self._asked):
                    self.save()
            elif state.step == 0 and recipe.evaluation.at_start:
                self._evaluate()
            while not (self._over or self._asked):
                number = state.step + 1
                with profile.of_step(number, last=self._is_followed(number)), self.patience.within_step():
                    set_activity("reading the batches", number)
                    with span(BATCHES):
                        own = list(itertools.islice(stream, each))
                    set_activity("training", number)
                    with communication.of_step(already_profiled=profile.runs):
                        report = train_step(self.run, *own, measured=self._is_logged(number))
                if Notice.save_failed in report.notices:
                    self.checkpoints.wait()  # which says why
                self._asked = Notice.stop in report.notices
                since.add(report, batches.pop_wait_seconds())
                last = state.step == self.total_steps
                self.tracker.advance(state.step)
                if self._is_logged(state.step):
                    rates = since.rates(self.run.world.size, self.rate.flops)
                    self.tracker.step({**since.row(state.step, report), **rates, **communication.take()})
                    since = _SinceLastLog()
                garbage.after(state.step)
                improved = False
                if last or _due(state.step, recipe.evaluation.every):
                    improved = self._evaluate()
                if self._over or improved or self._asked or _due(state.step, recipe.checkpoint.every):
                    self.save()

    def _is_logged(self, step: int) -> bool:
        return step == self.total_steps or step % self.recipe.train.log_every == 0

    def _is_followed(self, step: int) -> bool:
        """Whether this step is followed by an evaluation or a checkpoint."""
        return _due(step, self.recipe.evaluation.every) or _due(step, self.recipe.checkpoint.every)

    def _agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop. A collective."""
        self._asked = bool(max_over_ranks([int(self.stopping.received is not None)], self.run.world.device)[0])
        return self._asked

    def _stop(self) -> Stopped:
        """End in good order: the checkpoint complete, the marker written, and a line for the user."""
        world, step = self.run.world, self.run.state.step
        self.stopping.is_stopping = True
        self.checkpoints.wait()
        asked = world.gather(self.stopping.received)
        rank, signal = next((rank, signal) for rank, signal in enumerate(asked) if signal is not None)
        with world.fail_together("writing stopped.json"):
            if world.is_main:
                self.run_dir.write_stopped(step, signal.name, rank)
        progress = f"stopped by {signal.name} (rank {rank})"
        saved = f"{progress} after step {step}, saved in {step_path(self.checkpoints.root, step)}"
        if not self._saved:
            text = f"{progress} before the first step: the same command begins again"
        elif self.recipe.checkpoint.contents is CheckpointContents.model:
            text = f"{saved}, weights alone (checkpoint.contents=model): the same command starts a new run from them"
        else:
            text = f"{saved}: the same command goes on"
        return Stopped(text, exit_code(signal))

    @property
    def _over(self) -> bool:
        """Whether all steps are done, or `evaluation.patience` has run out."""
        patience = self.recipe.evaluation.patience
        return self.run.state.step >= self.total_steps or (
            patience is not None and self.run.state.not_better >= patience
        )

    def _why_stopped(self) -> str:
        state = self.run.state
        times = "1 evaluation" if state.not_better == 1 else f"{state.not_better} evaluations"
        return (
            f"stopped at step {state.step} of {self.total_steps}: {times} without a better {state.best_by} than "
            f"{state.best:.4f} at step {state.best_step} (evaluation.patience)"
        )

    def _batch(self, number: int) -> RankBatch:
        world, batch = self.run.world, self.data.batch(number)
        source = batch.source or 0  # of several that are mixed all have one loss, and a teacher of one width
        made = cut(
            batch,
            world.rank,
            world.size,
            self.tokenizer,
            self.cutting,
            guides={path: self.run.backward.guides[path].texts for path in guide_paths(self.losses[source])},
            teacher_dimension=self.data.teacher_dimension(source),
        )
        return made.pinned() if world.device.type == "cuda" else made

    def _evaluate(self) -> bool:
        """Measure, tell, and say whether this is the best step so far by `checkpoint.best_metric`.

        A run that is asked to stop leaves the evaluation, and does it when it goes on.
        """
        state = self.run.state
        set_activity("evaluating", state.step)
        self.patience.leave_steps()
        try:
            with self.tracker.progress() as progress, automatic_collection():
                figures = self.evaluator.evaluate(progress=progress, stop=self._agree_to_stop)
        except EvaluationInterrupted:
            state.evaluation_due = True
            return False
        state.evaluation_due = False
        if not figures:
            return False
        self.tracker.evaluation(state.step, figures)
        if self.best is None or state.step == 0:  # step 0 has no checkpoint to keep
            return False
        name, metric = self.best
        value = figures[name][metric]
        if state.best is not None and value <= state.best:
            state.not_better += 1
            return False
        state.best, state.best_step, state.not_better = value, state.step, 0
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
        seconds = self._seconds
        real = sum(r.real_tokens for r in self.reports)
        return {
            "step": step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            **report.measures,
            **self._by_source(),
            "samples_per_s": sum(r.num_rows for r in self.reports) / seconds,
            "tokens_per_s": real / seconds,
            "padding": 1.0 - real / max(1, sum(r.computed_tokens for r in self.reports)),
            "data_wait": self.waited / seconds,
        }

    def rates(self, ranks: int, matmul_rate: float) -> dict[str, float]:
        """What one rank does for the model, in 10^12 floating point operations a second, and its share of a rate."""
        flops = sum(r.flops for r in self.reports) / ranks / self._seconds
        return {"model_tflops": flops / 1e12, "mfu": flops / matmul_rate}

    @property
    def _seconds(self) -> float:
        return sum(r.seconds for r in self.reports) + self.waited

    def _by_source(self) -> dict[str, float]:
        """The mean loss of each source's batches since the last row, where batches are of one source."""
        found: dict[str, list[float]] = {}
        for name, value in ((n, v) for report in self.reports for n, v in report.measures.items()):
            if name.startswith("loss/"):
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}
