"""The training loop: optimizer steps, with logging, evaluation, checkpoints and garbage collection between them."""

import contextlib
import functools
import gc
import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.step_directory import step_path
from embedtrain.config.loss_checks import guide_paths
from embedtrain.config.recipe import CheckpointContents
from embedtrain.data.prefetch import Prefetcher
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.collectives import max_over_ranks
from embedtrain.distributed.signals import Notice, StopSignals, exit_code
from embedtrain.distributed.watchdog.watchdog import set_activity
from embedtrain.distributed.world import Timeouts, World
from embedtrain.errors import ConfigError, EvaluationInterrupted, Stopped
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.losses.excluded import no_negatives_warning
from embedtrain.losses.listwise import constant_scores_warning
from embedtrain.losses.sparsity import sparsity_warning
from embedtrain.planning.flops import FlopsReference
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.guides import GuideModel, StoredTeacher
from embedtrain.training.inputs import Run, RunInputs
from embedtrain.training.profile import BATCHES, StepProfiler, span
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from embedtrain.training.state import EncoderWithLoss, TrainState, as_dict
from embedtrain.training.step import StepContext, StepReport, train_step
from embedtrain.utils.formatting import format_count

COLLECT_EVERY = 50


class GarbageSchedule:
    """Collects garbage after some steps; see `scheduled_collection`."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._is_frozen = gc.get_freeze_count() > 0  # by the caller, who may have reasons

    def collect_after(self, step: int) -> None:
        """Collect if `step` is due. This depends on the step only, so all ranks collect at the same time."""
        if step % self.every:
            return
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True


@contextlib.contextmanager
def scheduled_collection(every: int = COLLECT_EVERY) -> Iterator[GarbageSchedule]:
    """Disable automatic collection during the block; restore it afterwards."""
    was_enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield GarbageSchedule(every)
    finally:
        if not frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def automatic_collection() -> Iterator[None]:
    """Enable automatic collection during the block, which is not a step: an evaluation, for example."""
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not was_enabled:
            gc.disable()


_CHECKED_STEPS = 10  # of a session, whose batches are searched for negatives


@dataclass(frozen=True, kw_only=True)
class RankBatches:
    """The local part of every global batch of a run, tokenised and cut into chunks."""

    inputs: RunInputs
    module: EncoderWithLoss
    tokenizer: TextTokenizer
    chunk_options: ChunkOptions
    guides: Mapping[str, GuideModel | StoredTeacher]
    world: World

    def __call__(self, number: int) -> RankBatch:
        """The local part of global batch `number`, counted from 0; callable from any thread."""
        self.inputs.cache.verification.check()
        data, losses = self.inputs.data, self.inputs.losses
        batch = data.batch(number)
        source = batch.source or 0  # sources that are mixed in one batch share a loss and a teacher dimension
        guides = {path: self.guides[path] for path in guide_paths(losses[source])}
        rank_batch = make_rank_batch(
            batch,
            self.world.rank,
            self.world.size,
            self.tokenizer,
            self.chunk_options,
            guides={path: guide.texts for path, guide in guides.items() if isinstance(guide, GuideModel)},
            stored_guides={path: guide for path, guide in guides.items() if isinstance(guide, StoredTeacher)},
            teacher_dimension=data.teacher_dimension(source),
        )
        rank_batch = rank_batch.prepared_for(self.module.loss, self.module.encoder.dimension)
        return rank_batch.pinned() if self.world.device.type == "cuda" else rank_batch


@dataclass(frozen=True, kw_only=True)
class PeriodicEvaluation:
    """Evaluation during training, and the best step so far."""

    # Each with the context in which the weights that it measures are in place: those that are exported first, then
    # others, whose sets have other names.
    evaluators: Sequence[tuple[Evaluator, Callable[[], AbstractContextManager[None]]]]
    best_metric: tuple[str, str] | None  # set and metric of `checkpoint.best_metric`; None if the recipe sets none
    state: TrainState
    tracker: Tracker

    def __call__(self, stop: Callable[[], bool]) -> bool:
        """Evaluate the current step, and return whether it is the best so far.

        If `stop`, a collective, returns True, the evaluation ends early and is repeated when the run resumes.
        """
        state = self.state
        try:
            metrics = self.measure(state.step, stop)
        except EvaluationInterrupted:
            state.evaluation_due = True
            return False
        state.evaluation_due = False
        if not metrics or self.best_metric is None:
            return False
        set_name, metric = self.best_metric
        if metric not in metrics[set_name]:  # those of a function are known only now
            raise ConfigError(
                f"checkpoint.best_metric={set_name}/{metric}: {set_name} has the metrics {', '.join(metrics[set_name])}"
            )
        if state.step == 0:  # which has no checkpoint to keep
            return False
        value = metrics[set_name][metric]
        if not value > (-math.inf if state.best is None else state.best):  # NaN is never better
            state.not_better += 1
            return False
        state.best, state.best_step, state.not_better = value, state.step, 0
        return True

    def measure(
        self, step: int, stop: Callable[[], bool] | None = None, *, in_place: bool = False
    ) -> dict[str, dict[str, float]]:
        """Evaluate and record the metrics of a step, by set; `in_place`: the exported weights are in place already.

        Raises EvaluationInterrupted if `stop`, a collective, returns True.
        """
        metrics: dict[str, dict[str, float]] = {}
        record = functools.partial(self.tracker.set_evaluated, step)
        record_queries = functools.partial(self.tracker.queries_evaluated, step)
        measured = self.evaluators[:1] if in_place else self.evaluators
        for evaluator, put_weights in measured:
            weights = contextlib.nullcontext() if in_place else put_weights()
            with self.tracker.progress() as progress, automatic_collection(), weights:
                metrics |= evaluator.evaluate(progress=progress, stop=stop, on_result=record, on_queries=record_queries)
        if not metrics:
            return metrics
        evaluators = [evaluator for evaluator, _ in measured]
        speeds = ", ".join(f"{name} {evaluator.speed(name)}" for evaluator in evaluators for name in evaluator.seconds)
        footer = f"took {speeds}" if speeds else ""
        datasets = {name: info for evaluator in evaluators for name, info in evaluator.datasets.items()}
        self.tracker.evaluation(step, metrics, datasets, footer=footer)
        return metrics


@dataclass(kw_only=True)
class TrainingLoop:
    """Trains to the last step, until the evaluation no longer improves, or until a signal arrives."""

    run: Run
    context: StepContext
    batches: RankBatches
    evaluation: PeriodicEvaluation
    checkpointer: Checkpointer
    tracker: Tracker
    stop_signals: StopSignals
    timeouts: Timeouts
    reference: FlopsReference  # of `mfu`

    def train(self) -> Stopped | None:
        """Train from the current state. After a signal, save a checkpoint and return why the run ends."""
        if not self._is_done or self.context.state.evaluation_due:
            with self.stop_signals.deferred():
                self._train_steps()
                if self.stop_signals.agreed or self._agree_to_stop():
                    return self._stop()
        if self.context.state.step < self._total_steps:
            self.tracker.note(self._early_stop_note())
        return None

    def _train_steps(self) -> None:
        state, recipe = self.context.state, self.run.recipe
        batches_per_step = recipe.train.gradient_accumulation_steps
        prefetcher = Prefetcher(
            self.batches,
            state.step * batches_per_step,
            self.batches.inputs.length.batches,
            workers=recipe.data.workers,
            ahead=2 * batches_per_step,
        )
        profiler = StepProfiler(
            recipe.tracking, self.run.world, self.run.run_dir.profile, self.tracker, log_every=self._log_every
        )
        profiler.report_skipped_steps(state.step, self._total_steps)
        throughput, warned, last_checked = _Throughput(), False, state.step + _CHECKED_STEPS
        self.checkpointer.prepare_asynchronous(self.context.module, self.context.optimizer)
        with (
            self.tracker.training(self._total_steps, state.step),
            contextlib.closing(iter(prefetcher)) as stream,
            scheduled_collection() as garbage,
            profiler,
        ):
            if state.evaluation_due:  # interrupted by a stop: the checkpoint does not contain its result
                if self._evaluate() or (self._is_done and not self.stop_signals.agreed):
                    self._save()
            elif state.step == 0 and recipe.evaluation.at_start:
                self._evaluate()
            throughput.ended = time.perf_counter()
            while not (self._is_done or self.stop_signals.agreed):
                step = state.step + 1
                is_followed = _is_due(step, recipe.evaluation.every) or _is_due(step, recipe.checkpoint.every)
                with profiler.profile_step(step, last=is_followed), self.timeouts.within_step():
                    set_activity("reading the batches", step)
                    with span(BATCHES):
                        rank_batches = list(itertools.islice(stream, batches_per_step))
                    if step <= last_checked:
                        last_checked = self._warn_of_no_negatives(step, rank_batches, last_checked)
                    set_activity("training", step)
                    with profiler.measure_communication():
                        report = train_step(self.context, *rank_batches, measured=self._is_logged(step))
                if Notice.save_failed in report.notices:
                    self.checkpointer.wait()  # raises the error of the save
                if Notice.not_compiled in report.notices:
                    for sentence in self.context.backward.eager_blocks.name(self.run.world):
                        self.tracker.warn(f"step {step}: {sentence}")
                self.stop_signals.agreed = Notice.stop in report.notices
                throughput.add(report, prefetcher.pop_wait_seconds())
                state.add_to_means({"loss": report.loss, **report.measures})
                self.tracker.advance(step)
                if self._is_logged(step):
                    warned = self._log(report, throughput, profiler.pop_communication(), warned=warned)
                    throughput = _Throughput(ended=throughput.ended)
                garbage.collect_after(step)
                improved = False
                if step == self._total_steps or _is_due(step, recipe.evaluation.every):
                    improved = self._evaluate()
                is_due = _is_due(step, recipe.checkpoint.every) or Notice.save_due in report.notices
                if is_due or self._is_done or improved or self.stop_signals.agreed:
                    self._save()
                    is_followed = True
                if is_followed:
                    throughput.ended = time.perf_counter()

    def _log(
        self, report: StepReport, throughput: "_Throughput", communication: Mapping[str, float], *, warned: bool
    ) -> bool:
        """Record the step; returns whether there has been a warning about its measures, which is printed once."""
        state, measures = self.context.state, report.measures
        row = throughput.row(state.step, report, state.pop_means())
        rates = throughput.rates(self.context.world.size, self.reference)
        self.tracker.step({**row, **rates, **communication})
        warning = None if warned else constant_scores_warning(measures) or sparsity_warning(measures)
        if warning is not None:
            self.tracker.warn(f"step {state.step}: {warning}")
        return warned or warning is not None

    def _warn_of_no_negatives(self, step: int, batches: Sequence[RankBatch], last_checked: int) -> int:
        """Warn if a batch has no negative, before it is trained; the last step to check, none after a warning.

        The host knows the texts of all ranks, so that no device is asked.
        """
        for batch in batches:
            warning = no_negatives_warning(batch.batch_info.prepared, batch.batch_info.rows)
            if warning is not None:
                self.tracker.warn(f"step {step}: {warning}")
                return 0
        return last_checked

    def _evaluate(self) -> bool:
        set_activity("evaluating", self.context.state.step)
        self.timeouts.leave_steps()
        return self.evaluation(stop=self._agree_to_stop)

    def _save(self) -> None:
        """Write a checkpoint of the current step."""
        context = self.context
        self.timeouts.leave_steps()
        with context.world.fail_together("looking for the output directory"):
            if context.world.is_main:
                self.run.run_dir.require_exists()
            # A checkpoint never contains what was learned from damaged rows.
            self.batches.inputs.cache.verification.wait()
        context.state.tracker_ids = context.world.broadcast(self.tracker.ids)
        self.checkpointer.save(context.module, context.optimizer, as_dict(context.state))

    def _agree_to_stop(self) -> bool:
        """Whether any rank has received a signal. A collective."""
        received = int(self.stop_signals.received is not None)
        self.stop_signals.agreed = bool(max_over_ranks([received], self.context.world.device)[0])
        return self.stop_signals.agreed

    def _stop(self) -> Stopped:
        """Wait for the checkpoint, write stopped.json, and return the message for the user."""
        world, step = self.context.world, self.context.state.step
        self.stop_signals.is_stopping = True
        self.checkpointer.wait()
        received = world.gather(self.stop_signals.received, signal.Signals)
        rank, stop = next((rank, stop) for rank, stop in enumerate(received) if stop is not None)
        with world.fail_together("writing stopped.json"):
            if world.is_main:
                self.run.run_dir.write_stopped(step, stop.name, rank)
        message = f"stopped by {stop.name} (rank {rank})"
        if step == 0:
            message += " before the first step: run the same command again"
        else:
            message += f" after step {step}, saved in {step_path(self.checkpointer.root, step)}"
            if self.run.recipe.checkpoint.contents is CheckpointContents.model:
                message += (
                    " without optimizer state (checkpoint.contents=model): the same command starts a new run from "
                    "these weights"
                )
            else:
                message += ": run the same command to resume"
        return Stopped(message, exit_code(stop))

    @property
    def _total_steps(self) -> int:
        return self.context.schedule.total_steps

    @property
    def _is_done(self) -> bool:
        """Whether all steps are complete, or `evaluation.patience` is exhausted."""
        state, patience = self.context.state, self.run.recipe.evaluation.patience
        return state.step >= self._total_steps or (patience is not None and state.not_better >= patience)

    def _is_logged(self, step: int) -> bool:
        return step == self._total_steps or step % self._log_every == 0

    @property
    def _log_every(self) -> int:
        return self.run.recipe.train.log_every or min(10, max(1, self._total_steps // 10))

    def _early_stop_note(self) -> str:
        state = self.context.state
        return (
            f"stopped at step {state.step} of {self._total_steps}: {format_count(state.not_better, 'evaluation')} "
            f"without a better {state.best_by} than {state.best:.4f} at step {state.best_step} (evaluation.patience)"
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass
class _Throughput:
    """Rates over the steps since the last logged one, without evaluation and checkpoints.

    The time from the end of a step to the end of the next one counts: between them a GPU runs the optimizer, which a
    step only queues, and the host logs.
    """

    reports: list[StepReport] = field(default_factory=list)
    wait_seconds: float = 0.0
    seconds: float = 0.0
    ended: float = field(default_factory=time.perf_counter)  # the last step, or what followed it

    def add(self, report: StepReport, wait_seconds: float) -> None:
        now = time.perf_counter()
        self.reports.append(report)
        self.wait_seconds += wait_seconds
        self.seconds += now - self.ended
        self.ended = now

    def row(self, step: int, report: StepReport, means: Mapping[str, float]) -> dict[str, float]:
        """The row of a step; `means` are those of the loss and its metrics since the last row."""
        seconds = self.seconds
        real_tokens = sum(r.real_tokens for r in self.reports)
        return {
            "step": step,
            "loss": means["loss"],
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            **report.group_lrs,
            **means,
            "samples_per_s": sum(r.num_rows for r in self.reports) / seconds,
            "tokens_per_s": real_tokens / seconds,
            "padding": 1.0 - real_tokens / max(1, sum(r.computed_tokens for r in self.reports)),
            "data_wait": self.wait_seconds / seconds,
        }

    def rates(self, num_ranks: int, reference: FlopsReference) -> dict[str, float]:
        """TFLOP/s of the model on one rank, and as fractions of what the device can reach, if known."""
        flops = sum(r.flops for r in self.reports) / num_ranks / self.seconds
        fractions = {"mfu": reference.peak, "matmul_fraction": reference.matmul}
        known = {name: flops / limit for name, limit in fractions.items() if limit is not None}
        return {"model_tflops": flops / 1e12, **known}
