"""The export that a run ends with: from live weights on all ranks, each writing its own rows."""

import contextlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from embedtrain.checkpoint.checkpointer import read_tensors
from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.snapshot import AVERAGE, WEIGHTS
from embedtrain.checkpoint.step_directory import open_checkpoint, step_path
from embedtrain.config.compose import to_plain
from embedtrain.config.loss_checks import matryoshka_dims_of
from embedtrain.config.recipe import Precision, Recipe
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.formats.export import ExportResult, export_dtype, live_weights, plan_export
from embedtrain.formats.export_record import export_lock
from embedtrain.formats.hub import upload_model
from embedtrain.formats.model_card import model_card, recipe_of_weights
from embedtrain.formats.peft import AdapterBase
from embedtrain.formats.verify import MIN_BF16_EFFECT, ExportReference, export_tolerance
from embedtrain.inference.loading.load import LoadedModel
from embedtrain.inference.quantised import write_trained_ranges
from embedtrain.models.adapters import without_adapters
from embedtrain.models.stored_weights import stored_dtype
from embedtrain.tracking.tracker import Tracker
from embedtrain.training.inputs import Run
from embedtrain.training.state import EncoderWithLoss, TrainState


def exported_step(recipe: Recipe, state: TrainState) -> int:
    """The step whose weights are exported: the best if `checkpoint.best_metric` selected one, otherwise the last."""
    best = state.best_step if recipe.checkpoint.best_metric is not None else None
    return state.step if best is None else best


def export_run(
    run: Run,
    model: LoadedModel,
    trained: EncoderWithLoss,
    state: TrainState,
    tracker: Tracker,
) -> ExportResult:
    """Write `model/` from the live weights, after `read_best` if a best step was selected. Every rank calls it."""
    recipe, run_dir, world = run.recipe, run.run_dir, run.world
    step = exported_step(recipe, state)
    config, dtype = recipe.export, export_dtype(recipe.export.dtype, model.source)
    reference = _reference(model, world.device, recipe.parallel.precision, dtype) if config.check else None
    weights = live_weights(model.encoder)
    difference: float | None = None
    tolerance: float | None = None
    with contextlib.ExitStack() as stack:
        scratch = ""
        with world.fail_together("exporting the model"):
            if world.is_main:
                scratch = stack.enter_context(export_lock(run_dir.model)).name
        unfinished = run_dir.path / world.broadcast(scratch)
        with world.fail_together("exporting the model"):
            run_dir.require_intact()
            adapter = None if model.adapted is None else _adapter_base(model, recipe, run_dir)
            architecture, base = run_dir.architecture, model.source
            export = plan_export(
                run_dir.model, unfinished, architecture, weights, dtype, config, adapter=adapter, base=base
            )
            export = replace(export, matryoshka_dims=frozenset(matryoshka_dims_of(recipe.loss)))
            if world.is_main:
                export.begin()
        with world.fail_together("exporting the model"), tracker.phase("exporting the model"):
            export.write(weights.rows, main=world.is_main)

        def finish() -> None:
            nonlocal difference, tolerance
            write_trained_ranges(unfinished, trained.loss.state_dict(), step)
            # Of a run that had finished before, or exports an earlier step, the recipe may be another one by now.
            saved = open_checkpoint(step_path(run_dir.checkpoints, step)).manifest.recipe
            card = model_card(
                recipe_of_weights(saved, to_plain(recipe)),
                run_dir.path,
                step=step,
                dimension=config.truncate_dim or model.encoder.dimension,
                max_length=model.tokenizer.max_length,
                prompts=model.source.prompts,
                formats=config.formats,
                name=config.push_to_hub,
            )
            in_bf16 = recipe.parallel.precision is not Precision.fp32
            result = export.finish(
                card,
                reference,
                trust_remote_code=recipe.model.trust_remote_code,
                phase=tracker.phase,
                bf16_tokenizer=model.tokenizer if in_bf16 else None,
            )
            difference, tolerance = result.difference, result.tolerance
            for note in result.notes:
                tracker.note(note)

        # Each library computes the probe texts on rank 0's CPU: of a large model for longer than ranks wait.
        world.run_on_main("exporting the model", finish)
        if reference is None:
            tracker.warn("export.check=false: the exported model was not compared with the encoder")
    return ExportResult(run_dir.model, world.broadcast(difference), world.broadcast(tolerance), dtype)


def read_best(recipe: Recipe, trained: EncoderWithLoss, checkpoint: Path, world: World) -> None:
    """Read the weights of the best step, or their average."""
    with world.fail_together("opening the best checkpoint"):
        folder = open_checkpoint(checkpoint)
    has_average = recipe.optim.ema is not None and AVERAGE in folder.kinds
    read_tensors(folder, trained, None, AVERAGE if has_average else WEIGHTS)


def upload_run(run: Run, directory: Path, step: int, tracker: Tracker) -> None:
    """Upload the exported model of a run, if the recipe says where. A collective."""
    repository = run.recipe.export.push_to_hub
    if repository is None:
        return

    def upload() -> None:
        tracker.note(f"uploaded: {upload_model(directory, repository, private=run.recipe.export.private, step=step)}")

    with tracker.phase(f"uploading to {repository}"):
        run.world.run_on_main("uploading the model", upload)


def _reference(model: LoadedModel, device: torch.device, precision: Precision, dtype: torch.dtype) -> ExportReference:
    """What an export in `dtype` has to reproduce. A collective."""
    vectors = _probe_outputs(model, device)
    base_vectors: Tensor | None = None
    if model.adapted is not None:
        with without_adapters(model.encoder):
            base_vectors = _probe_outputs(model, device).cpu()
    prompts, tokenizer = model.source.prompts, model.tokenizer
    reference = ExportReference(
        vectors,
        export_tolerance(dtype, exact_encoder=precision is Precision.fp32),
        prompts,
        tokenizer.max_length,
        base_vectors,
        compared=model.source.kind.files.compared(tokenizer, prompts),
    )
    return reference if precision is Precision.fp32 else replace(reference, min_effect=MIN_BF16_EFFECT)


def _probe_outputs(model: LoadedModel, device: torch.device) -> Tensor:
    """The outputs for the probe texts, see `ModelFiles.probe`. A collective."""
    files, training = model.source.kind.files, model.encoder.training
    model.encoder.eval()
    outputs = files.probe(model.encoder, model.tokenizer, model.source.prompts, device)
    model.encoder.train(training)
    reshard(model.encoder)
    return outputs


def _adapter_base(model: LoadedModel, recipe: Recipe, run_dir: RunDirectory) -> AdapterBase:
    bf16_base = any(p.dtype == torch.bfloat16 for p in model.encoder.parameters() if not p.requires_grad)
    rounded = bf16_base and stored_dtype(model.source) == torch.float32
    in_4bit = recipe.model.lora.load_in_4bit
    return AdapterBase(run_dir.adapter, model.source, recipe.seed, rounded=rounded, load_in_4bit=in_4bit)
