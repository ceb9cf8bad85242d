"""Training, told from the start to the end: data, model, resume, loop, export."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from embedtrain.checkpoint.card import model_card
from embedtrain.checkpoint.directory import write_architecture
from embedtrain.checkpoint.export import PROBES, Exported, export_dtype, live_pieces, plan_export, tolerance_of
from embedtrain.checkpoint.folder import StepFolder, read_manifest, step_path
from embedtrain.checkpoint.store import Checkpoints
from embedtrain.checkpoint.tensors import read_tensors
from embedtrain.config.compose import to_plain
from embedtrain.config.loss_checks import guides_of
from embedtrain.config.schema import Precision, Recipe
from embedtrain.data.batches import TrainData
from embedtrain.data.chosen import chosen_data
from embedtrain.data.store.cache import Cache, cache_directory
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.distributed.world import World
from embedtrain.evaluation.encode import SentenceEncoder
from embedtrain.evaluation.evaluator import Evaluator, metrics_of
from embedtrain.evaluation.metrics import split_best
from embedtrain.evaluation.sets import load_sets
from embedtrain.losses.choose import choose_losses, notes_on
from embedtrain.losses.types import FROM_ROWS
from embedtrain.models.source import open_source
from embedtrain.tracking.console import Console
from embedtrain.tracking.summary import before_and_after, figures_at
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.batches import Cutting, cost_of_a_pass
from embedtrain.training.course import (
    changes_since,
    identity_of,
    require_same_course,
    require_same_data,
    require_same_tokenizer,
)
from embedtrain.training.gradients import Backward
from embedtrain.training.guide import GuideModel, load_guides
from embedtrain.training.loop import Loop
from embedtrain.training.model import LoadedModel, load_model, quiet_libraries
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.rundir import RunDirectory
from embedtrain.training.state import TrainState, from_dict
from embedtrain.training.step import Trainable
from embedtrain.training.trained import Trained


def train(recipe: Recipe, world: World) -> Path:
    """Train as the recipe says, or go on where an earlier run of it stopped. Every rank calls it.

    Returns:
        The directory of the exported model.

    Raises:
        EmbedtrainError: on every rank alike; the first rank it concerns has the cause.
    """
    quiet_libraries()
    console = Console(speaks=world.is_main)
    run_dir = RunDirectory(Path(recipe.output_dir))
    console.note(f"{recipe.name} on {world.size} rank{'s' * (world.size > 1)} ({world.device.type}), in {run_dir.path}")

    # What a user may have got wrong comes first: rows, evaluation sets, the run directory.
    with world.together("opening the model"):
        prompts = open_source(recipe.model).prompts
    with world.together("reading training data"), console.counted() as told:
        cache = Cache(directory=cache_directory(recipe.data.cache_dir), keep=recipe.data.cache, told=told)
        data, losses = chosen_data(recipe, prompts, cache)
        total_steps, total_batches = _lengths(recipe, data)
    require_same_data(data, world)
    sets = load_sets(recipe.evaluation.sets, world, subset=recipe.evaluation.subset, cache=cache)
    best = split_best(recipe.checkpoint.best, metrics_of(sets)) if recipe.checkpoint.best is not None else None
    for note in (*data.notes, *(note for loaded in sets for note in loaded.notes)):
        console.note(note)
    with world.together("making the run directory"):
        run_dir.path.mkdir(parents=True, exist_ok=True)
    identity = identity_of(recipe, data, losses, prompts)
    checkpoints = Checkpoints(
        run_dir.checkpoints,
        recipe.checkpoint,
        world,
        about={"identity": identity, "recipe": to_plain(recipe)},
        say=console.warn,
        timeout=recipe.parallel.timeout,
    )
    found = checkpoints.newest()
    if found is not None:
        require_same_course(found, identity)
        for line in changes_since(found, recipe, identity):
            console.warn(line)

    model = load_model(
        recipe.model,
        recipe.parallel,
        world,
        seed=recipe.seed,
        tokenizer=_own_vocabulary(recipe, data, run_dir, world, console, anew=found is None),
        read_weights=found is None,
    )
    _tokenise(data, model, cache, world, console)
    guides, guide_notes = load_guides(
        list(dict.fromkeys(path for loss in losses for path in guides_of(loss))),
        recipe.parallel,
        world,
        chunk_tokens=recipe.train.chunk_tokens,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    for note in (*model.notes, *guide_notes):
        console.note(note)
    with world.together("making the loss"):
        loss = choose_losses(
            losses,
            dimension=model.encoder.dimension,
            guide_dimensions=_guide_dimensions(guides, data),
            seed=recipe.seed,
        ).to(world.device)
        for note in notes_on(losses, data.names, loss, model.encoder.dimension):
            console.note(note)
    trained = Trained(model.encoder, loss)
    optimizer = build_optimizer(model.encoder, recipe.optim, loss)
    checkpoints.require_room(trained)
    state = TrainState() if found is None else _resume(found, checkpoints, trained, optimizer, total_steps, console)
    if state.best_by != recipe.checkpoint.best:
        state.best_by, state.best, state.best_step, state.not_better = recipe.checkpoint.best, None, None, 0
    encoder = SentenceEncoder(
        model.encoder,
        model.tokenizer,
        world,
        chunk_tokens=recipe.evaluation.chunk_tokens,
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
        gather=recipe.evaluation.gather,
    )
    evaluator = Evaluator(sets, encoder, world, index=recipe.evaluation.index)
    with world.together("writing the run directory"):
        if world.is_main:
            run_dir.write_recipe(recipe, world.size)
            write_architecture(run_dir.architecture, model.source, model.tokenizer)

    with world.together("starting to record"):
        resumed = state.step or None  # weights alone, or nothing: the rows of an earlier run are put aside
        tracker = Tracker.open(
            recipe, world, run_dir.path, resumed_step=resumed, wandb_id=state.wandb_id, console=console
        )
    with tracker, checkpoints:
        loop = Loop(
            recipe=recipe,
            run=Trainable(
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
                    whole_gradients=model.whole_gradients,
                    guides=guides,
                    sources=data.names if data.plan.by_source and len(losses) > 1 else None,
                ),
                optim=recipe.optim,
                state=state,
            ),
            data=data,
            losses=losses,
            tokenizer=model.tokenizer,
            cutting=_cutting(recipe, model, world),
            checkpoints=checkpoints,
            evaluator=evaluator,
            best=best,
            tracker=tracker,
            total_steps=total_steps,
            total_batches=total_batches,
        )
        loop.go()
        checkpoints.wait()
        exported = _export(recipe, model, trained, encoder, state, run_dir, world, tracker)
        for line in before_and_after(run_dir.path):
            tracker.note(line)
        tracker.note(f"model: {exported.directory}")
    return exported.directory


def _cutting(recipe: Recipe, model: LoadedModel, world: World) -> Cutting:
    """How texts are cut into chunks."""
    given = recipe.train.pass_tokens
    costs = cost_of_a_pass(on_gpu=world.device.type == "cuda", sharded=model.layout.shard > 1)
    return Cutting(recipe.train.chunk_tokens, recipe.train.keep_tokens, costs if given is None else given)


def _guide_dimensions(guides: Mapping[str, GuideModel], data: TrainData) -> list[dict[str, int]]:
    """For each source the widths of other models' vectors, and of those that its rows hold."""
    widths = {path: guide.dimension for path, guide in guides.items()}
    of_rows = [data.teacher_dimension(source) for source in range(len(data.stores))]
    return [widths if width is None else {**widths, FROM_ROWS: width} for width in of_rows]


def _tokenise(data: TrainData, model: LoadedModel, cache: Cache, world: World, console: Console) -> None:
    """Have the texts' tokens at hand."""
    require_same_tokenizer(model.tokenizer, world)
    with world.together("tokenising"), console.counted() as told:
        notes = data.prepare(model.tokenizer, replace(cache, told=told))
    for note in notes:
        console.note(note)


def _lengths(recipe: Recipe, data: TrainData) -> tuple[int, int]:
    """Optimiser steps and global batches of the run: `train.accumulation` batches a step, in the last what is left."""
    each = recipe.train.accumulation
    if recipe.train.epochs is None:
        steps = data.plan.total_steps(recipe.train.steps, None)
        return steps, steps * each
    batches = data.plan.total_steps(None, recipe.train.epochs)
    return -(-batches // each), batches


def _resume(
    found: StepFolder,
    checkpoints: Checkpoints,
    trained: Trained,
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


def _own_vocabulary(
    recipe: Recipe, data: TrainData, run_dir: RunDirectory, world: World, console: Console, *, anew: bool
) -> PreTrainedTokenizerBase | None:
    """The vocabulary trained on the data, for a model from scratch that names no tokenizer.

    A run that resumes reads the one it began with; any other makes its own, for rows and options may be others.
    """
    if recipe.model.config is None or recipe.model.tokenizer is not None:
        return None
    directory = run_dir.tokenizer
    with world.together("training a vocabulary"):
        if world.is_main and (anew or not directory.is_dir()):
            with console.phase("training a vocabulary on the data"):
                made = train_tokenizer(
                    data.texts(),
                    recipe.model.vocab_size,
                    recipe.model.max_length or 512,
                    lowercase=recipe.model.vocab_lowercase,
                )
                shutil.rmtree(directory, ignore_errors=True)
                made.save_pretrained(directory)
    with world.together("reading the vocabulary"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    console.note(f"vocabulary: {len(tokenizer):,} pieces, trained on the data, in {directory}")
    return tokenizer


def _export(
    recipe: Recipe,
    model: LoadedModel,
    trained: Trained,
    encoder: SentenceEncoder,
    state: TrainState,
    run_dir: RunDirectory,
    world: World,
    tracker: Tracker,
) -> Exported:
    """Write `model/` from the live weights, those of the best step where one was asked for."""
    step = state.step
    if recipe.checkpoint.best is not None and state.best_step not in (None, state.step):
        step = int(state.best_step or 0)
        with world.together("opening the best checkpoint"):
            folder = read_manifest(step_path(run_dir.checkpoints, step))
        read_tensors(folder, trained, None)
        tracker.note(f"exporting step {step}, the best by {recipe.checkpoint.best} ({state.best:.4f})")
    dtype = export_dtype(recipe.export.dtype, model.source)
    expected = encoder.encode_all(PROBES)
    specs, pieces = live_pieces(model.encoder)
    exported: Exported | None = None
    with world.together("exporting the model"):
        export = plan_export(run_dir.model, run_dir.architecture, specs, dtype)
        if world.is_main:
            export.begin()
    with world.together("exporting the model"), tracker.phase("exporting the model"):
        export.write(pieces, main=world.is_main)
    with world.together("exporting the model"):
        if world.is_main:
            with tracker.phase("reopening the export with sentence-transformers"):
                card = model_card(
                    to_plain(recipe),
                    figures_at(run_dir.path, step),
                    step=step,
                    dimension=expected.shape[1],
                    max_length=model.tokenizer.max_length,
                    prompts=model.source.prompts,
                )
                exported = export.finish(
                    card,
                    expected=expected,
                    tolerance=tolerance_of(dtype, exact_encoder=recipe.parallel.precision is Precision.fp32),
                    trust_remote_code=recipe.model.trust_remote_code,
                )
    return world.broadcast(exported)  # type: ignore[return-value]
