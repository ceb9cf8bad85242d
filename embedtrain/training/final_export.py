"""The export that a run ends with: from live weights on all ranks, each writing its own rows."""

import contextlib

import torch
from torch import Tensor

from embedtrain.checkpoint.checkpointer import read_tensors
from embedtrain.checkpoint.export.hub import upload_model
from embedtrain.checkpoint.export.model_card import model_card
from embedtrain.checkpoint.export.model_export import ExportResult, export_dtype, export_lock, live_weights, plan_export
from embedtrain.checkpoint.export.verify import PROBES, AdapterBase, ExportReference, export_tolerance
from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.step_directory import open_checkpoint, step_path
from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import Precision, Recipe
from embedtrain.distributed.world import World
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.loading.load import LoadedModel
from embedtrain.models.adapters import without_adapters
from embedtrain.models.build import stored_dtype
from embedtrain.tracking.metrics import metrics_at
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.state import EncoderWithLoss, TrainState


def exported_step(recipe: Recipe, state: TrainState) -> int:
    """The step whose weights are exported: the best one where one was asked for and found, else the last."""
    best = state.best_step if recipe.checkpoint.best_metric is not None else None
    return state.step if best is None else best


def export_run(
    recipe: Recipe,
    model: LoadedModel,
    trained: EncoderWithLoss,
    encoder: SentenceEncoder,
    state: TrainState,
    run_dir: RunDirectory,
    world: World,
    tracker: Tracker,
) -> ExportResult:
    """Write `model/` from the live weights, those of the best step where one was asked for. Every rank calls it.

    Raises:
        EmbedtrainError: on every rank alike; checkpoints and an earlier `model/` stay.
    """
    step = exported_step(recipe, state)
    if step != state.step:
        with world.fail_together("opening the best checkpoint"):
            folder = open_checkpoint(step_path(run_dir.checkpoints, step))
        read_tensors(folder, trained, None)
        tracker.note(f"exporting step {step}, the best by {recipe.checkpoint.best_metric} ({state.best:.4f})")
    asked, dtype = recipe.export, export_dtype(recipe.export.dtype, model.source)
    expected: ExportReference | None = None
    if asked.check:
        tolerance = export_tolerance(dtype, exact_encoder=recipe.parallel.precision is Precision.fp32)
        vectors = encoder.encode_all(PROBES)
        without: Tensor | None = None
        if model.adapted is not None:
            with without_adapters(model.encoder):
                without = encoder.encode_all(PROBES).cpu()
        expected = ExportReference(vectors, tolerance, model.source.prompts, model.tokenizer.max_length, without)
    pieces = live_weights(model.encoder)
    exported: ExportResult | None = None
    with contextlib.ExitStack() as held:
        with world.fail_together("exporting the model"):
            settings, base = (None, None) if model.adapted is None else (run_dir.adapter, _base(model, recipe))
            export = plan_export(
                run_dir.model, run_dir.architecture, pieces, dtype, asked, settings=settings, base=base
            )
            if world.is_main:
                held.enter_context(export_lock(run_dir.model))
                export.begin()
        with world.fail_together("exporting the model"), tracker.phase("exporting the model"):
            export.write(pieces.rows, main=world.is_main)
        with world.fail_together("exporting the model"):
            if world.is_main:
                card = model_card(
                    to_plain(recipe),
                    metrics_at(run_dir.path, step),
                    step=step,
                    dimension=model.encoder.dimension,
                    max_length=model.tokenizer.max_length,
                    prompts=model.source.prompts,
                    formats=asked.formats,
                    name=asked.push_to_hub,
                )
                trusted = recipe.model.trust_remote_code
                exported = export.finish(card, expected, trust_remote_code=trusted, phase=tracker.phase)
        if not asked.check:
            tracker.warn("export.check=false: nobody has compared the exported model with the encoder")
        with world.fail_together("uploading the model"):
            if world.is_main and asked.push_to_hub is not None:
                with tracker.phase(f"uploading to {asked.push_to_hub}"):
                    address = upload_model(run_dir.model, asked.push_to_hub, private=asked.private, step=step)
                tracker.note(f"uploaded: {address}")
    return world.broadcast(exported)  # type: ignore[return-value]


def _base(model: LoadedModel, recipe: Recipe) -> AdapterBase:
    coarse = any(p.dtype == torch.bfloat16 for p in model.encoder.parameters() if not p.requires_grad)
    coarse = coarse and stored_dtype(model.source) == torch.float32
    return AdapterBase(model.source, recipe.seed, rounded=coarse, load_in_4bit=recipe.model.lora.load_in_4bit)
