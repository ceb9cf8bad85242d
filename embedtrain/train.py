"""Training, told from the start to the end: data, model, resume, loop, export."""

import os
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import yaml
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from embedtrain import __version__
from embedtrain.checkpoint.card import model_card
from embedtrain.checkpoint.directory import write_architecture
from embedtrain.checkpoint.export import PROBES, Exported, export_dtype, export_model, tolerance_of
from embedtrain.checkpoint.folder import read_manifest, step_path
from embedtrain.checkpoint.store import Checkpoints
from embedtrain.checkpoint.tensors import read_tensors
from embedtrain.config.compose import to_plain
from embedtrain.config.schema import Precision, Recipe
from embedtrain.data.batches import TrainData, load_train_data
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.evaluation.encode import SentenceEncoder
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.sets import load_sets
from embedtrain.losses.choose import choose_loss
from embedtrain.models.source import open_source
from embedtrain.tracking.console import Console
from embedtrain.tracking.metrics import read_metrics
from embedtrain.tracking.tracker import METRICS_FILE, Tracker
from embedtrain.training.gradients import Backward
from embedtrain.training.loop import Figures, Loop
from embedtrain.training.model import LoadedModel, load_model, quiet_libraries
from embedtrain.training.optimizer import Schedule, build_optimizer
from embedtrain.training.state import TrainState, from_dict
from embedtrain.training.step import Trainable

ARCHITECTURE, CHECKPOINTS, MODEL, RECIPE = "architecture", "checkpoints", "model", "recipe.yaml"


def train(recipe: Recipe, world: World) -> Path:
    """Train as the recipe says, or go on where an earlier run of it stopped. Every rank calls it.

    Returns:
        The directory of the exported model.

    Raises:
        EmbedtrainError: on every rank alike; the first rank it concerns has the cause.
    """
    quiet_libraries()
    console = Console(speaks=world.is_main)
    run_dir = Path(recipe.output_dir)
    console.note(f"{recipe.name} on {world.size} rank{'s' * (world.size > 1)} ({world.device.type}), in {run_dir}")

    # What a user may have got wrong comes first: rows, evaluation sets, the run directory.
    with world.together("opening the model"):
        prompts = open_source(recipe.model).prompts
    with world.together("reading training data"):
        data = load_train_data(
            recipe.data.train,
            on_error=recipe.data.on_error,
            query_prompt=prompts.get("query", ""),
            document_prompt=prompts.get("document", ""),
            seed=recipe.seed,
            global_batch_size=recipe.train.global_batch_size,
        )
        total_steps = data.plan.total_steps(recipe.train.steps, recipe.train.epochs)
    sets = load_sets(recipe.evaluation.sets, world)
    for note in (*data.notes, *(note for loaded in sets for note in loaded.notes)):
        console.note(note)
    with world.together("making the run directory"):
        run_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(
        run_dir / CHECKPOINTS, recipe.checkpoint, world, identity=_identity(recipe, data), say=console.warn
    )
    found = checkpoints.newest()

    model = load_model(
        recipe.model,
        recipe.parallel,
        world,
        seed=recipe.seed,
        tokenizer=_own_vocabulary(recipe, data, run_dir, world, console),
        read_weights=found is None,
    )
    for note in model.notes:
        console.note(note)
    optimizer = build_optimizer(model.encoder, recipe.optim)
    state = TrainState()
    if found is not None:
        saved = checkpoints.resume(found, model.encoder, optimizer)
        state = from_dict(saved) if saved is not None else state
        console.note(
            f"resuming from {found.path}, written on {found.manifest['world_size']} rank(s)"
            if saved is not None
            else f"{found.path} holds weights alone: a new run starts from them at step 0"
        )
    encoder = SentenceEncoder(
        model.encoder,
        model.tokenizer,
        world,
        chunk_tokens=recipe.evaluation.chunk_tokens,
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
    )
    evaluator = Evaluator(sets, encoder, world, depth=recipe.evaluation.depth)
    _check_best(recipe, evaluator)
    with world.together("writing the run directory"):
        if world.is_main:
            _write_recipe(run_dir / RECIPE, recipe, world)
            write_architecture(run_dir / ARCHITECTURE, model.source, model.tokenizer)

    with world.together("starting to record"):
        resumed = state.step if found is not None else None
        tracker = Tracker.open(recipe, world, run_dir, resumed_step=resumed, wandb_id=state.wandb_id, console=console)
    with tracker:
        Loop(
            recipe=recipe,
            run=Trainable(
                world=world,
                encoder=model.encoder,
                optimizer=optimizer,
                schedule=Schedule(optimizer, recipe.optim, total_steps),
                backward=Backward(
                    model.encoder,
                    choose_loss(recipe.loss),
                    world,
                    seed=recipe.seed,
                    dummy=model.tokenizer.dummy(),
                ),
                optim=recipe.optim,
                state=state,
            ),
            data=data,
            tokenizer=model.tokenizer,
            checkpoints=checkpoints,
            evaluate=evaluator.evaluate,
            tracker=tracker,
            total_steps=total_steps,
        ).go()
        exported = _export(recipe, model, encoder, state, run_dir, world, tracker)
        for line in _before_and_after(run_dir):
            tracker.note(line)
        tracker.note(f"model: {exported.directory}")
    return exported.directory


def _before_and_after(run_dir: Path) -> list[str]:
    """One line per evaluation set: its first figure in the first and in the last row of this run."""
    lines = []
    by_set: dict[str, list[dict[str, Any]]] = {}
    for row in read_metrics(run_dir / METRICS_FILE) if (run_dir / METRICS_FILE).is_file() else []:
        if "set" in row:
            by_set.setdefault(row["set"], []).append(row)
    for name, measured in by_set.items():
        metric = (
            "ndcg@10" if "ndcg@10" in measured[0] else next(key for key in measured[0] if key not in ("step", "set"))
        )
        first, last = measured[0], measured[-1]
        if first["step"] != last["step"]:
            lines.append(
                f"{name}: {metric} {first[metric]:.4f} at step {first['step']}, {last[metric]:.4f} at step {last['step']}"
            )
    return lines


def _own_vocabulary(
    recipe: Recipe, data: TrainData, run_dir: Path, world: World, console: Console
) -> PreTrainedTokenizerBase | None:
    """The vocabulary trained on the data, for a model from scratch that names no tokenizer; made once a run."""
    if recipe.model.config is None or recipe.model.tokenizer is not None:
        return None
    directory = run_dir / "tokenizer"
    with world.together("training a vocabulary"):
        if world.is_main and not directory.is_dir():
            with console.phase("training a vocabulary on the data"):
                made = train_tokenizer(
                    data.texts(),
                    recipe.model.vocab_size,
                    recipe.model.max_length or 512,
                    lowercase=recipe.model.vocab_lowercase,
                )
                unfinished = directory.with_name("tokenizer.tmp")
                made.save_pretrained(unfinished)
                unfinished.rename(directory)
    with world.together("reading the vocabulary"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    console.note(f"vocabulary: {len(tokenizer):,} pieces, trained on the data, in {directory}")
    return tokenizer


def _identity(recipe: Recipe, data: TrainData) -> dict[str, Any]:
    """The options that decide what is learnt from which rows in which order: a resumed run must share them."""
    model = to_plain(recipe.model)
    return {
        "seed": recipe.seed,
        "train.global_batch_size": recipe.train.global_batch_size,
        "data.train": to_plain(recipe.data.train),
        "rows of data.train": len(data),
        "loss": to_plain(recipe.loss),
        **{f"model.{key}": model[key] for key in ("path", "config", "pooling", "normalize", "max_length")},
    }


def _check_best(recipe: Recipe, evaluator: Evaluator) -> None:
    if recipe.checkpoint.best is None:
        return
    name, metric = recipe.checkpoint.best.rsplit("/", 1)
    there = evaluator.metrics
    if metric not in there.get(name, ()):
        allowed = ", ".join(f"{key}/{value}" for key, values in there.items() for value in values)
        raise ConfigError(f"checkpoint.best={recipe.checkpoint.best}: there is no such figure; allowed are {allowed}")


def _write_recipe(path: Path, recipe: Recipe, world: World) -> None:
    versions = {"embedtrain": __version__, "python": sys.version.split()[0]}
    for name in ("torch", "transformers", "sentence-transformers", "datasets"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    content = to_plain(recipe) | {"versions": versions | {"world_size": world.size}}
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(unfinished, path)


def _export(
    recipe: Recipe,
    model: LoadedModel,
    encoder: SentenceEncoder,
    state: TrainState,
    run_dir: Path,
    world: World,
    tracker: Tracker,
) -> Exported:
    """Write `model/` from the live weights, those of the best step where one was asked for."""
    step = state.step
    if recipe.checkpoint.best is not None and state.best_step not in (None, state.step):
        step = int(state.best_step or 0)
        folder = read_manifest(step_path(run_dir / CHECKPOINTS, step))
        read_tensors(folder.path, model.encoder, None)
        tracker.note(f"exporting step {step}, the best by {recipe.checkpoint.best} ({state.best:.4f})")
    dtype = export_dtype(recipe.export.dtype, model.source)
    expected = encoder.encode_all(PROBES)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = cast("dict[str, Tensor]", get_model_state_dict(model.encoder, options=options))
    make = partial(
        export_model,
        run_dir / MODEL,
        run_dir / ARCHITECTURE,
        weights,
        dtype=dtype,
        expected=expected,
        tolerance=tolerance_of(dtype, exact_encoder=recipe.parallel.precision is Precision.fp32),
    )
    exported: Exported | None = None
    with world.together("exporting the model"):
        if world.is_main:
            with tracker.phase("exporting the model and reopening it with sentence-transformers"):
                card = model_card(
                    to_plain(recipe),
                    figures_of(run_dir, step),
                    step=step,
                    dimension=expected.shape[1],
                    max_length=model.tokenizer.max_length,
                )
                exported = make(card=card)
    return world.broadcast(exported)  # type: ignore[return-value]


def figures_of(run_dir: Path, step: int) -> Figures:
    """What was measured at `step`, as metrics.jsonl tells."""
    path = run_dir / METRICS_FILE
    rows = read_metrics(path) if path.is_file() else []
    return {
        str(row["set"]): {key: value for key, value in row.items() if key not in ("step", "set")}
        for row in rows
        if row.get("step") == step and "set" in row
    }
