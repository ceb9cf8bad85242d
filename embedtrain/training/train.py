"""Training, told from the start to the end: data, model, resume, loop, export."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.export.adapters import BASE_WEIGHTS, write_adapter_config
from embedtrain.checkpoint.export.hub import require_export_support
from embedtrain.checkpoint.export.model_directory import write_architecture
from embedtrain.checkpoint.run_directory import RunDirectory, output_dir_lock
from embedtrain.checkpoint.step_directory import Checkpoint
from embedtrain.config.accelerate import describe_accelerate_config
from embedtrain.config.compose import to_plain
from embedtrain.config.loss_checks import guide_paths
from embedtrain.config.recipe import Precision, Recipe
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.cache_dir import cache_place
from embedtrain.data.train_data import TrainData, load_recipe_data
from embedtrain.distributed.signals import Notice, StopSignals
from embedtrain.distributed.timeouts import Timeouts
from embedtrain.distributed.world import World
from embedtrain.evaluation.evaluator import Evaluator, metric_names
from embedtrain.evaluation.metrics import parse_best_metric
from embedtrain.evaluation.sets import load_sets
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.loading.load import LoadedModel, load_model, quiet_libraries, verify_packing
from embedtrain.losses.build import row_spec_of
from embedtrain.models.build import weights_digest
from embedtrain.models.source import open_model_source
from embedtrain.planning.flops import model_flops
from embedtrain.planning.model_costs import compute_dtype
from embedtrain.planning.workload import StepWorkload
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import metric_changes
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.backward import Backward
from embedtrain.training.final_export import export_run, exported_step
from embedtrain.training.guides import load_guides
from embedtrain.training.loop import TrainingLoop
from embedtrain.training.matmul_rate import MatmulRate, bf16_notes, matmul_rate
from embedtrain.training.objective import build_loss
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, pass_overhead
from embedtrain.training.report_sample import choose_sample
from embedtrain.training.resume import Effect, describe_changes, require_same_data, require_same_run, run_identity
from embedtrain.training.run_reporter import RunReporter
from embedtrain.training.state import EncoderWithLoss, TrainState, from_dict
from embedtrain.training.step import StepContext
from embedtrain.training.tokenization import load_or_train_vocabulary, tokenize_data


def train(recipe: Recipe, world: World, stopping: StopSignals | None = None) -> Path:
    """Train as the recipe says, or go on where an earlier run of it stopped. Every rank calls it.

    Args:
        recipe: what to do.
        world: the ranks.
        stopping: this process's signals, if they are listened to.

    Returns:
        The directory of the exported model.

    Raises:
        EmbedtrainError: on every rank alike; the first rank it concerns has the cause.
        Stopped: on every rank alike, after the same step, a signal asked a rank to stop.
    """
    quiet_libraries()
    with contextlib.ExitStack() as held:
        return _train(recipe, world, stopping or StopSignals(), held)


def _train(recipe: Recipe, world: World, stopping: StopSignals, held: contextlib.ExitStack) -> Path:
    console = Console(enabled=world.is_main)
    run_dir = RunDirectory(Path(recipe.output_dir))
    console.note(f"{recipe.name} on {world.size} rank{'s' * (world.size > 1)} ({world.device.type}), in {run_dir.path}")

    # What a user may have got wrong comes first: rows, evaluation sets, the run directory.
    with world.fail_together("opening the model"):
        if world.is_main:
            require_export_support(recipe.export)
        source = open_model_source(recipe.model)
        prompts = source.prompts
        base = weights_digest(source) if world.is_main and recipe.model.lora.on else None
    place = cache_place(recipe.data.cache_dir, run_dir.cache, world, console.note)
    with world.fail_together("reading training data"), console.progress() as told:
        cache = Cache(directory=place, progress=told)
        data, losses = load_recipe_data(recipe, prompts, cache)
        total_steps, total_batches = _lengths(recipe, data)
    require_same_data(data, world)
    sets = load_sets(recipe.evaluation.sets, world, subset=recipe.evaluation.subset, cache=cache)
    best = (
        parse_best_metric(recipe.checkpoint.best_metric, metric_names(sets))
        if recipe.checkpoint.best_metric is not None
        else None
    )
    _tell(
        console, [*describe_accelerate_config(recipe), *data.notes, *(note for loaded in sets for note in loaded.notes)]
    )
    held.enter_context(_taken(run_dir, world, recipe.parallel.timeout))
    identity = run_identity(recipe, data, losses, prompts) | {BASE_WEIGHTS: world.broadcast(base)}
    checkpoints = Checkpointer(
        run_dir.checkpoints,
        recipe.checkpoint,
        world,
        metadata={"identity": identity, "recipe": to_plain(recipe)},
        log=console.warn,
        timeout=recipe.parallel.timeout,
    )
    found = checkpoints.newest()
    _compare(found, identity, recipe, console)

    rate = _rate(recipe.parallel.precision, world, console)
    model = load_model(
        recipe.model,
        recipe.parallel,
        world,
        seed=recipe.seed,
        tokenizer=load_or_train_vocabulary(recipe, data, run_dir, world, console, anew=found is None),
        read_weights=found is None,
        work=StepWorkload.of(recipe),
    )
    tokenize_data(data, model, cache, world, console)
    guides, guide_notes = load_guides(
        list(dict.fromkeys(path for loss in losses for path in guide_paths(loss))),
        recipe.parallel,
        world,
        chunk_tokens=recipe.train.chunk_tokens,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    _tell(console, [*model.notes, *guide_notes])
    loss = build_loss(recipe, losses, data, model, guides, world, console)
    trained = EncoderWithLoss(model.encoder, loss)
    optimizer = build_optimizer(model.encoder, recipe.optim, loss)
    checkpoints.require_disk_space(trained, total_steps)
    state = _state(found, checkpoints, trained, optimizer, recipe.checkpoint.best_metric, total_steps, console)
    if found is not None:  # whose weights stand only now
        model = verify_packing(model, recipe.model, recipe.parallel, world, say=console.note)
    encoder = SentenceEncoder.from_model(
        model, world, chunk_tokens=recipe.evaluation.chunk_tokens, unshard=recipe.evaluation.unshard
    )
    with (
        _recorded(recipe, run_dir, world, model, state, console) as tracker,
        checkpoints,
        RunReporter(recipe, run_dir, world, encoder, tracker, state, total_steps) as account,
        world.watchdog_guard(),
    ):
        account.before(lambda: choose_sample(sets, data, losses, prompts))
        loop = TrainingLoop(
            recipe=recipe,
            run=StepContext(
                world=world,
                trained=trained,
                optimizer=optimizer,
                schedule=Schedule(optimizer, recipe.optim, total_steps),
                backward=Backward(
                    model.encoder,
                    loss,
                    world,
                    seed=recipe.seed,
                    dummy=model.tokenizer.dummy(),
                    reduce_per_step=model.reduce_per_step,
                    guides=guides,
                    sources=data.names if data.plan.by_source and len(losses) > 1 else None,
                    row_specs=[row_spec_of(loss) for loss in losses] if recipe.tracking.geometry else None,
                ),
                optim=recipe.optim,
                state=state,
                flops=model_flops(model.encoder),
                notices=lambda: (stopping.notice | Notice.save_failed) if checkpoints.failed else stopping.notice,
                wait_for_staging=checkpoints.wait_for_staging,
            ),
            data=data,
            losses=losses,
            tokenizer=model.tokenizer,
            cutting=_cutting(recipe, model, world),
            checkpoints=checkpoints,
            evaluator=Evaluator(sets, encoder, world, index=recipe.evaluation.index),
            best=best,
            tracker=tracker,
            total_steps=total_steps,
            total_batches=total_batches,
            run_dir=run_dir,
            stopping=stopping,
            patience=Timeouts(world, recipe.parallel.timeout, recipe.parallel.step_timeout),
            rate=rate,
        )
        stopped = loop.go()
        if stopped is None:
            checkpoints.wait()
            exported = export_run(recipe, model, trained, encoder, state, run_dir, world, tracker)
            tracker.exported(exported.directory)
            _tell(console, [*metric_changes(run_dir.path), f"model: {exported.directory}"])
            account.after(exported_step(recipe, state))
        else:
            account.stopped()
    if stopped is not None:
        raise stopped
    return exported.directory


def _compare(found: Checkpoint | None, identity: Mapping[str, Any], recipe: Recipe, console: Console) -> None:
    """Refuse what would be another run than the checkpoint's, if there is one, and say what else is otherwise now."""
    if found is None:
        return
    require_same_run(found, identity)
    for effect, line in describe_changes(found, recipe).items():
        (console.warn if effect is Effect.changes_training else console.note)(line)


def _tell(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.note(note)


@contextlib.contextmanager
def _taken(run_dir: RunDirectory, world: World, timeout: float) -> Iterator[None]:
    """Make the run directory, and keep other runs out of it."""
    with world.fail_together("making the run directory"):
        run_dir.path.mkdir(parents=True, exist_ok=True)
    with output_dir_lock(run_dir.lock, world, timeout):
        if world.watchdog is not None:
            world.watchdog.resume_hint = run_dir.resume_hint
        yield


def _recorded(
    recipe: Recipe, run_dir: RunDirectory, world: World, model: LoadedModel, state: TrainState, console: Console
) -> Tracker:
    """Write what the run is into its directory, and start to record what becomes of it."""
    with world.fail_together("writing the run directory"):
        if world.is_main:
            run_dir.stopped.unlink(missing_ok=True)
            run_dir.write_recipe(recipe, world.size, model.source.commit)
            # Anew: what else lies there would be exported, and obeyed by the libraries that open it.
            shutil.rmtree(run_dir.architecture, ignore_errors=True)
            write_architecture(run_dir.architecture, model.source, model.tokenizer)
            if model.adapted is not None:
                write_adapter_config(run_dir.adapter, model.adapted, recipe.model, model.source)
    with world.fail_together("starting to record"):
        resumed = state.step or None  # weights alone, or nothing: the rows of an earlier run are put aside
        return Tracker.open(
            recipe,
            world,
            run_dir.path,
            resumed_step=resumed,
            evaluated=not state.evaluation_due,
            wandb_id=state.wandb_id,
            console=console,
        )


def _cutting(recipe: Recipe, model: LoadedModel, world: World) -> ChunkOptions:
    """How texts are cut into chunks."""
    given = recipe.train.pass_overhead_tokens
    costs = pass_overhead(on_gpu=world.device.type == "cuda", sharded=model.layout.shard > 1)
    return ChunkOptions(recipe.train.chunk_tokens, model.activation_tokens, costs if given is None else given)


def _rate(precision: Precision, world: World, console: Console) -> MatmulRate:
    """What the ranks' devices can do; before the model is there, which needs their memory."""
    rate = matmul_rate(world, compute_dtype(precision))
    _tell(console, [f"mfu is a share of {rate}", *bf16_notes(precision, world.device)])
    return rate


def _lengths(recipe: Recipe, data: TrainData) -> tuple[int, int]:
    """Optimizer steps and global batches of the run; the last step may have fewer batches."""
    each = recipe.train.gradient_accumulation_steps
    if recipe.train.epochs is None:
        steps = data.plan.total_steps(recipe.train.steps, None)
        return steps, steps * each
    batches = data.plan.total_steps(None, recipe.train.epochs)
    return -(-batches // each), batches


def _state(
    found: Checkpoint | None,
    checkpoints: Checkpointer,
    trained: EncoderWithLoss,
    optimizer: torch.optim.AdamW,
    best_by: str | None,
    total_steps: int,
    console: Console,
) -> TrainState:
    """Where the run stands; of what was best so far nothing, where it is told by something else now."""
    state = TrainState() if found is None else _resume(found, checkpoints, trained, optimizer, total_steps, console)
    if state.best_by != best_by:
        state.best_by, state.best, state.best_step, state.not_better = best_by, None, None, 0
    return state


def _resume(
    found: Checkpoint,
    checkpoints: Checkpointer,
    trained: EncoderWithLoss,
    optimizer: torch.optim.AdamW,
    total_steps: int,
    console: Console,
) -> TrainState:
    """Where the run stands after reading the checkpoint."""
    saved = checkpoints.resume(found, trained, optimizer)
    if found.step >= total_steps:
        console.note(
            f"{found.path} is the end of this run: raise train.steps to go on, or set another output_dir to start anew"
        )
        return from_dict(found.manifest["state"])
    if saved is None:
        console.note(f"{found.path} holds weights alone: a new run starts from them at step 0")
        return TrainState()
    console.note(f"resuming from {found.path}, written on {found.manifest['world_size']} rank(s)")
    return from_dict(saved)
