"""Training from start to end: set-up, resume, loop, export."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.step_directory import step_path
from embedtrain.config.compose import to_plain
from embedtrain.config.evaluation import TRAINED
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.block_compute import num_graphs
from embedtrain.distributed.device import deterministic_algorithms
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.world import Timeouts, World, joined_world
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.types import CompressedVectors
from embedtrain.formats.export import ExportResult
from embedtrain.formats.model_card import OF_EXPORT
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.load import quiet_libraries, verify_and_compile
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.models.rope import RopeTheta
from embedtrain.planning.flops import model_flops
from embedtrain.report.changes import describe_outcome
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import datasets_at, metrics_at
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.final_export import export_run, exported_step, read_best, upload_run
from embedtrain.training.inputs import Run, RunInputs, read_inputs, truncate_dims
from embedtrain.training.loop import PeriodicEvaluation, RankBatches, TrainingLoop
from embedtrain.training.optimizer import Schedule, build_optimizer, describe_groups, trained_parameters
from embedtrain.training.resume import measures_otherwise, restore
from embedtrain.training.run_reporter import RunReporter, choose_sample
from embedtrain.training.schedule import require_rates, schedule_warnings
from embedtrain.training.setup import (
    build_backward,
    build_loss,
    choose_precision,
    chunk_options,
    claim_output_dir,
    flops_reference,
    load_models,
    open_checkpoints,
    open_tracker,
    require_new,
)
from embedtrain.training.state import EncoderWithLoss, TrainState, WeightAverage
from embedtrain.training.step import StepContext
from embedtrain.utils.formatting import format_count


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The model that a run has exported."""

    directory: Path
    step: int  # whose weights they are
    has_trained: bool  # False: the run had finished before
    metrics: dict[str, dict[str, float]]  # of this step, by evaluation set


@contextlib.contextmanager
def training_world(recipe: Recipe) -> Iterator[World]:
    """The ranks that train a recipe, and the settings that must be made before they join."""
    parallel = recipe.parallel
    with deterministic_algorithms(parallel.deterministic), joined_world(parallel.timeout) as world:
        yield world


def train(recipe: Recipe, world: World, stop_signals: StopSignals | None = None) -> TrainedModel:
    """Train a recipe, or resume an earlier run of it.

    Every rank calls it. All ranks raise the same EmbedtrainError, or Stopped after a signal.
    """
    quiet_libraries()
    console = Console(enabled=world.is_main, verbose=recipe.tracking.verbose)
    run_dir = RunDirectory(Path(recipe.output_dir))
    ranks = f"{format_count(world.size, 'rank')} ({world.device.type})"
    console.note(f"{recipe.name} on {ranks}, in {run_dir.path}")
    run = Run(choose_precision(recipe, run_dir, world, console), world, console, run_dir)
    require_new(run)
    # The user's mistakes come first: before a model is loaded or anything is written.
    inputs = read_inputs(run)
    with claim_output_dir(run):
        return _train(run, inputs, stop_signals or StopSignals())


@contextlib.contextmanager
def _in_place(*replacements: WeightAverage | RopeTheta | None) -> Iterator[None]:
    """What is evaluated and exported, in place of what is trained, during the block."""
    with contextlib.ExitStack() as stack:
        for replacement in replacements:
            if replacement is not None:
                stack.enter_context(replacement.in_place())
        yield


def _train(run: Run, inputs: RunInputs, stop_signals: StopSignals) -> TrainedModel:
    recipe, world, run_dir = run.recipe, run.world, run.run_dir
    require_rates(recipe.optim, inputs.length.steps)
    run.console.warn(*schedule_warnings(recipe.optim, inputs.length.steps))
    checkpointer, start = open_checkpoints(run, inputs)
    reference = flops_reference(recipe, world, run.console)
    model, guides = load_models(run, inputs, start)
    module = EncoderWithLoss(model.encoder, build_loss(run, inputs, model, guides))
    schedule = Schedule(build_optimizer(module.encoder, recipe.optim, module.loss), recipe.optim, inputs.length.steps)
    groups = describe_groups(trained_parameters(module.encoder, recipe.optim, module.loss), recipe.optim)
    run.note(f"parameter group {label}: {text}" for label, text in groups.items())
    run.console.note(checkpointer.require_disk_space(module, inputs.length.steps, recipe.optim))
    average = _average(run, module, checkpointer)
    state = restore(run, inputs, start, checkpointer, module, schedule.optimizer)
    served = _served_theta(run, module)
    if average is not None:
        schedule.optimizer.register_step_post_hook(lambda *_: average.update(state.step))
    if not start.from_scratch:  # its weights have only now been read
        model = verify_and_compile(model, recipe.model, recipe.parallel, world, progress=run.console.note)
    context = StepContext(
        module=module,
        schedule=schedule,
        backward=build_backward(run, inputs, model, module.loss, guides),
        state=state,
        flops=tuple(map(model_flops, module.encoder.towers.values())),
        notices=lambda: stop_signals.notice | checkpointer.notice | context.backward.eager_blocks.notice,
        wait_for_staging=checkpointer.wait_for_staging,
    )
    encoder = SentenceEncoder.from_model(
        model, world, chunk_tokens=recipe.evaluation.chunk_tokens, unshard=recipe.evaluation.unshard, truncate=False
    )
    with (
        open_tracker(run, model, state, inputs.data.stores, has_finished=start.has_finished) as tracker,
        checkpointer,
        RunReporter(run, encoder, tracker, state, inputs.length) as reporter,
        world.watchdog_guard(),
        contextlib.ExitStack() as ending,
    ):
        reporter.encode_before_training(
            lambda: choose_sample(inputs.sets, inputs.data, inputs.losses, model.source.prompts)
        )
        evaluation = _evaluation(run, inputs, encoder, state, tracker, average, served)
        loop = TrainingLoop(
            run=run,
            context=context,
            batches=RankBatches(
                inputs=inputs,
                module=module,
                tokenizer=model.tokenizer,
                chunk_options=chunk_options(run, model),
                guides=guides,
                world=world,
            ),
            evaluation=evaluation,
            checkpointer=checkpointer,
            tracker=tracker,
            stop_signals=stop_signals,
            timeouts=Timeouts(world, recipe.parallel.timeout, recipe.parallel.step_timeout, num_graphs),
            reference=reference,
        )
        stopped = loop.train()
        if stopped is not None:
            reporter.report_stopped()
        else:
            checkpointer.wait()
            step = exported_step(recipe, state)
            asked = start.has_finished and _lacks_evaluation(run, evaluation, step)
            if asked and step == state.step:
                evaluation.measure(step)
            ending.enter_context(_in_place(average, served))
            if step != state.step:
                read_best(recipe, module, step_path(run_dir.checkpoints, step), world)
                tracker.note(f"exporting step {step}, the best by {recipe.checkpoint.best_metric} ({state.best:.4f})")
                if asked:
                    evaluation.measure(step, in_place=True)
            exported = export_run(run, model, module, state, tracker)
            tracker.exported(exported.directory)
            if start.has_finished:
                _update_recipe(run)
            _report_outcome(run, exported, step)
            reporter.report_finished(step, exported.describe())
            upload_run(run, exported.directory, step, tracker)
            metrics = world.broadcast(metrics_at(run_dir.path, step))
        world.run_on_main("closing the trackers", tracker.close)  # wandb may still upload the model
    if stopped is not None:
        raise stopped
    return TrainedModel(exported.directory, step, not start.has_finished, metrics)


def _update_recipe(run: Run) -> None:
    """Let recipe.yaml of a finished run describe this export; the rest is that of the training. A collective."""
    with run.world.fail_together("writing recipe.yaml"):
        if run.world.is_main:
            run.run_dir.update_recipe({group: to_plain(run.recipe)[group] for group in OF_EXPORT})


def _lacks_evaluation(run: Run, evaluation: PeriodicEvaluation, step: int) -> bool:
    """Whether the recipe of a finished run asks for an evaluation of `step` that was not made. A collective."""
    lacks = False
    with run.world.fail_together("reading metrics.jsonl"):
        if run.world.is_main:
            done = datasets_at(run.run_dir.path, step)
            asked = [item for evaluator, _ in evaluation.evaluators for item in evaluator.datasets.items()]
            lacks = (
                run.recipe.evaluation.function is not None  # whose code may have changed
                or any(name not in done or done[name].counts != info.counts for name, info in asked)
                or measures_otherwise(run.run_dir.saved_recipe(), run.recipe)
            )
    return run.world.broadcast(lacks)


def _average(run: Run, module: EncoderWithLoss, checkpointer: Checkpointer) -> WeightAverage | None:
    """The average of the weights that the recipe asks for, which checkpoints contain."""
    ema = run.recipe.optim.ema
    average = None if ema is None else WeightAverage(module, ema, checkpointer.wait_for_staging)
    checkpointer.average = None if average is None else average.tensors
    return average


def _served_theta(run: Run, module: EncoderWithLoss) -> RopeTheta | None:
    """The base of the rotary embeddings that the export has instead of the trained one, if the recipe asks for it."""
    theta = run.recipe.export.rope_theta
    return None if theta is None else RopeTheta(module.encoder, theta, "export.rope_theta")


def _evaluation(
    run: Run,
    inputs: RunInputs,
    encoder: SentenceEncoder,
    state: TrainState,
    tracker: Tracker,
    average: WeightAverage | None,
    theta: RopeTheta | None,
) -> PeriodicEvaluation:
    """The evaluation of the sets with what is exported, and with the trained weights if the recipe asks for it."""
    evaluation = run.recipe.evaluation
    model: PairScorer | SentenceEncoder = encoder
    if inputs.source.kind.scores_pairs:
        model = PairScorer(encoder, windows=evaluation.document_windows)
    evaluator = Evaluator(
        inputs.sets,
        model,
        run.world,
        truncate_dims=truncate_dims(run.recipe, inputs.losses, inputs.source),
        compressed=CompressedVectors(evaluation.vectors, evaluation.calibration),
        index=evaluation.index,
        function=inputs.function,
    )
    evaluators = [(evaluator, functools.partial(_in_place, average, theta))]
    if evaluation.trained_weights:
        trained = Evaluator(inputs.sets, model, run.world, index=evaluation.index, suffix=TRAINED)
        evaluators.append((trained, functools.partial(_in_place, theta)))
    return PeriodicEvaluation(evaluators=evaluators, best_metric=inputs.best_metric, state=state, tracker=tracker)


def _report_outcome(run: Run, model: ExportResult, step: int) -> None:
    """Print what training has changed, where the model is, and how its check has ended; on rank 0."""
    if run.world.is_main:
        changes = describe_outcome(
            run.run_dir.path,
            step,
            selects_best=run.recipe.checkpoint.best_metric is not None,
            evaluates_between=run.recipe.evaluation.every > 0,
        )
        run.note([*changes, f"model: {model.directory} ({model.describe()})"])
