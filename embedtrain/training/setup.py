"""Parts of a training run, in the order in which they are built: data, run directory, model, loss, optimizer."""

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.run_directory import RunDirectory, output_dir_lock
from embedtrain.config.compose import to_plain
from embedtrain.config.loss_checks import guide_paths
from embedtrain.config.recipe import LOGIT_SCORE, Precision, Recipe
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.distributed.block_compute import require_fp8
from embedtrain.distributed.device import advise_when_exhausted, has_bf16
from embedtrain.distributed.sharding import copy_local_rows, resolve_precision
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.formats.export_record import require_only_export
from embedtrain.formats.peft import BASE_WEIGHTS, write_adapter_config
from embedtrain.formats.transformers import read_tokenizer
from embedtrain.formats.weights import write_architecture
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.losses.build import build_losses, exit_layers, loss_notes, row_spec_of
from embedtrain.losses.types import FROM_ROWS, Loss
from embedtrain.models.blocks import EarlyExits
from embedtrain.models.build import has_dropout
from embedtrain.planning.flops import FlopsReference, matmul_rate, peak_flops
from embedtrain.planning.memory import StepWorkload
from embedtrain.planning.model_costs import compute_dtype
from embedtrain.tracking.console import Console
from embedtrain.tracking.tracker import Tracker, describe_peak_memory
from embedtrain.training.backward import Backward
from embedtrain.training.guides import (
    GuideModel,
    StoredTeacher,
    encode_missing,
    load_guides,
    set_teacher_maps,
    teachers_identity,
)
from embedtrain.training.inputs import Run, RunInputs
from embedtrain.training.rank_batch import ChunkOptions, pass_overhead
from embedtrain.training.resume import RunStart, run_identity
from embedtrain.training.state import TrainState
from embedtrain.utils.files import CHECKSUMS, damaged_files, remove_tree, write_checksums
from embedtrain.utils.formatting import format_bytes


def choose_precision(recipe: Recipe, run_dir: RunDirectory, world: World, console: Console) -> Recipe:
    """The recipe with the precision of the run that it resumes, or else that of the ranks, if it chooses none.

    A collective; all ranks raise the same errors.
    """
    parallel, device = recipe.parallel, world.device
    saved: str | None = None
    with world.fail_together("reading the precision of the run"):
        if world.is_main and parallel.precision is Precision.auto:
            saved = run_dir.saved_precision()
    saved = world.broadcast(saved)
    precision = resolve_precision(parallel.precision if saved is None else Precision(saved), world)
    if parallel.fp8:
        require_fp8(world, precision)
    if precision is Precision.bf16 and device.type == "cpu" and not has_bf16(device):
        console.note("this CPU has no bf16 instructions (AMX, AVX512-BF16): parallel.precision=fp32 is faster")
    elif parallel.precision is Precision.auto:
        reason = f"all {device.type.upper()}s have instructions for it"
        if saved is not None:
            reason = "as before"
        elif precision is Precision.fp32:
            reason = f"not every {device.type.upper()} has bf16 instructions"
        console.note(f"precision: {precision.value}, {reason} (parallel.precision)")
    return replace(recipe, parallel=replace(parallel, precision=precision))


def flops_reference(recipe: Recipe, world: World, console: Console) -> FlopsReference:
    """The references of `mfu` and `matmul_fraction` on GPUs.

    The rate is measured before the model is loaded, because that needs memory as well. On CPUs there is none: the rate
    in one product is no limit, because clocks and threads differ between products and training.
    """
    if world.device.type != "cuda":
        return FlopsReference()
    dtype = compute_dtype(recipe.parallel.precision)
    rate, peak = matmul_rate(world, dtype), peak_flops(torch.cuda.get_device_name(world.device), dtype)
    console.note(f"matmul_fraction is relative to {rate}")
    if peak is not None:
        console.note(f"mfu is relative to the {peak / 1e12:,.0f} TFLOP/s of the datasheet")
    return FlopsReference(peak, rate.flops)


def load_or_train_vocabulary(run: Run, data: TrainData, *, from_scratch: bool) -> PreTrainedTokenizerBase | None:
    """The vocabulary trained on the data, for a model from scratch without a tokenizer.

    A run that resumes reads its own unless it is damaged; any other trains one, because rows and options may differ.
    """
    recipe, world, console = run.recipe, run.world, run.console
    if recipe.model.config is None or recipe.model.tokenizer is not None:
        return None
    directory = run.run_dir.tokenizer
    with world.fail_together("training a vocabulary"):
        damaged = damaged_files(directory) if world.is_main and (directory / CHECKSUMS).exists() else []
        if damaged and not from_scratch:
            console.warn(f"{directory / damaged[0]} is damaged: the vocabulary is trained again")
        if world.is_main and (from_scratch or damaged or not directory.is_dir()):
            with console.phase("training a vocabulary on the data"):
                trained = train_tokenizer(
                    data.texts(),
                    recipe.model.vocab_size,
                    recipe.model.max_length or 512,
                    lowercase=recipe.model.vocab_lowercase,
                )
                remove_tree(directory)
                trained.save_pretrained(directory)
                write_checksums(directory)
    with world.fail_together("reading the vocabulary"):
        tokenizer = read_tokenizer(directory, trust_remote_code=False)
    console.note(f"vocabulary: {len(tokenizer):,} pieces, trained on the data, in {directory}")
    return tokenizer


def tokenize_data(run: Run, inputs: RunInputs, model: LoadedModel, *, from_scratch: bool) -> None:
    """Tokenise all texts that are not in the cache, and print notes.

    A run from scratch computes weights that follow from the texts, such as those of static queries.
    """
    data, world, console = inputs.data, run.world, run.console
    require_same_tokenizer(model.tokenizer, world)
    with world.fail_together("tokenising"), console.progress() as progress:
        notes = data.prepare(model.tokenizer, replace(inputs.cache, progress=progress))
    run.note(notes)
    if from_scratch:
        assert data.tokens is not None
        weights = model.source.kind.weights_of_data(model.source, data.tokens, world, console)
        for name, values in weights.items():
            copy_local_rows(model.encoder.state_dict()[name], values)


def require_same_tokenizer(tokenizer: TextTokenizer, world: World) -> None:
    """Reject tokenizers that differ between hosts: ranks would disagree about lengths and chunks."""
    reference, *others = world.gather(tokenizer.fingerprint)
    for rank, fingerprint in enumerate(others, start=1):
        if fingerprint != reference:
            raise DataError(
                f"rank {rank} has another tokenizer than rank 0: the model's files must be the same on all hosts"
            )


def build_loss(
    run: Run, inputs: RunInputs, model: LoadedModel, guides: Mapping[str, GuideModel | StoredTeacher]
) -> Loss:
    """The loss of all sources, on this rank's device. Prints notes about it."""
    recipe, world, data = run.recipe, run.world, inputs.data
    with world.fail_together("building the loss"):
        dimension, guide_dimensions = model.encoder.dimension, _guide_dimensions(guides, data)
        score = model.source.kind.score(model.source)
        loss = build_losses(
            inputs.losses,
            dimension=dimension,
            guide_dimensions=guide_dimensions,
            seed=recipe.seed,
            score=None if score.named_by_loss else score,
            num_batches=inputs.length.batches,
        )
        loss = model.source.kind.training_loss(loss, recipe, model.source, inputs.length.batches)
        loss = loss.to(world.device)
        model.source.kind.share_weights(loss, model.encoder)
    set_teacher_maps(loss, guides, world)
    use_tf32_products(loss, recipe.parallel.precision)
    run.note(loss_notes(inputs.losses, data.names, loss, dimension))
    return loss


def _guide_dimensions(guides: Mapping[str, GuideModel | StoredTeacher], data: TrainData) -> list[dict[str, int]]:
    """For each source: dimensions of the guides' embeddings, and of the vectors in its rows."""
    dimensions = {path: guide.dimension for path, guide in guides.items()}
    in_rows = [data.teacher_dimension(source) for source in range(len(data.stores))]
    return [dimensions if width is None else {**dimensions, FROM_ROWS: width} for width in in_rows]


def require_new(run: Run) -> None:
    """Raise ConfigError if the run directory holds a run, and `resume=never`. A collective."""
    with run.world.fail_together("looking at the output directory"):
        if run.world.is_main:
            run.run_dir.require_new(run.recipe.resume)


@contextlib.contextmanager
def claim_output_dir(run: Run) -> Iterator[None]:
    """Create the run directory, and hold its lock during the block."""
    world, run_dir = run.world, run.run_dir
    with world.fail_together("creating the run directory"):
        run_dir.path.mkdir(parents=True, exist_ok=True)
        if world.is_main:
            run_dir.require_own()
            require_only_export(run_dir.model)
    with output_dir_lock(run_dir.lock, world, run.recipe.parallel.timeout):
        require_new(run)
        if world.watchdog is not None:
            world.watchdog.resume_hint = run_dir.resume_hint
        yield


def open_checkpoints(run: Run, inputs: RunInputs) -> tuple[Checkpointer, RunStart]:
    """The checkpoints of the run, and the one from which it starts."""
    identity = run_identity(run.recipe, inputs.data, inputs.losses, inputs.source.prompts)
    teachers: dict[str, Mapping[str, str]] = {}
    with run.world.fail_together("reading the loss's guide or teacher"):
        if run.world.is_main:
            teachers = teachers_identity([path for loss in inputs.losses for path in guide_paths(loss)])
    identity |= run.world.broadcast(teachers)
    identity |= {BASE_WEIGHTS: run.world.broadcast(inputs.base_digest)}
    checkpointer = Checkpointer(
        run.run_dir.checkpoints,
        run.recipe.checkpoint,
        run.world,
        metadata={"identity": identity, "recipe": to_plain(run.recipe)},
        log=run.console.warn,
        timeout=run.recipe.parallel.timeout,
    )
    start = RunStart(checkpointer.newest())
    start.check(identity, run.recipe, inputs.length.steps, run.console)
    return checkpointer, start


def load_models(
    run: Run, inputs: RunInputs, start: RunStart
) -> tuple[LoadedModel, dict[str, GuideModel | StoredTeacher]]:
    """The model to train, and the guides by path. If there is a checkpoint, its weights are read from it later."""
    recipe, world, data = run.recipe, run.world, inputs.data
    tokenizer = load_or_train_vocabulary(run, data, from_scratch=start.from_scratch)
    missing = encode_missing(run, inputs)  # before the model, which needs the memory
    with run.console.phase("loading the model"):
        model = load_model(
            recipe.model,
            recipe.parallel,
            world,
            seed=recipe.seed,
            source=inputs.source,
            tokenizer=tokenizer,
            read_weights=start.from_scratch,
            work=StepWorkload.of(recipe, texts_per_row=data.texts_per_row),
        )
    if inputs.exit_path is not None:
        exits = EarlyExits(model.encoder, inputs.exit_path, exit_layers(inputs.losses))
        model.encoder.exits = exits
        model = replace(model, tokenizer=model.tokenizer.with_parts(1 + len(exits.layers)))
    _advise_when_exhausted(run, model)
    tokenize_data(run, inputs, model, from_scratch=start.from_scratch)
    guides, guide_notes = load_guides(
        list(dict.fromkeys(path for loss in inputs.losses for path in guide_paths(loss))),
        recipe.parallel,
        world,
        chunk_tokens=recipe.train.chunk_tokens,
        more=missing,
    )
    for source, loss_of_source in enumerate(inputs.losses):
        for path in guide_paths(loss_of_source):
            if isinstance(teacher := guides[path], StoredTeacher):
                teacher.check([data.stores[source]], world)
    equal = [
        name
        for name, settings in zip(data.names, data.settings, strict=True)
        if settings.text_as_positive
        and not settings.delete_words
        and settings.text_format.query_prompt == settings.text_format.document_prompt
    ]
    if equal and not has_dropout(model.encoder):
        run.console.warn(
            f"{', '.join(equal)}: texts are their own positives, and the model has no dropout, so that both have the "
            "same vector: set model.dropout=0.1, or delete_words of the source"
        )
    memory = f"memory in the lines of steps: {describe_peak_memory(world.device)}, on rank 0"
    run.note([*model.notes, *guide_notes, memory])
    return model, guides


def _advise_when_exhausted(run: Run, model: LoadedModel) -> None:
    """Name what was planned, and the options to lower, in the message of a rank whose memory is exhausted."""
    layout, train, evaluation = model.layout, run.recipe.train, run.recipe.evaluation
    options = [f"train.chunk_tokens={train.chunk_tokens}"]
    if model.activation_tokens > train.chunk_tokens:
        options.append(f"train.activation_tokens={model.activation_tokens}")
    savings = [
        option
        for option, in_use in (
            ("parallel.activation_checkpointing=true", layout.activation_checkpointing is True),
            ("parallel.strategy=fsdp", layout.shard > 1 or layout.replicate == 1),
            ("parallel.cpu_offload=true", layout.cpu_offload or run.world.device.type == "cpu"),
        )
        if not in_use
    ]
    planned = format_bytes(model.planned_memory, binary=True)
    training = f"{planned} were planned for a step: lower {' or '.join(options)}, use more ranks"
    if savings:
        training += f", or set {' or '.join(savings)}"
    lower = f"lower evaluation.chunk_tokens={evaluation.chunk_tokens}, or set evaluation.index.place=host"
    advise_when_exhausted("evaluating", lower)
    advise_when_exhausted("", training)


def build_backward(
    run: Run,
    inputs: RunInputs,
    model: LoadedModel,
    loss: Loss,
    guides: Mapping[str, GuideModel | StoredTeacher],
) -> Backward:
    """The computation of gradients."""
    losses, data = inputs.losses, inputs.data
    has_geometry = run.recipe.tracking.geometry and model.source.kind.has_one_vector
    return Backward(
        model.encoder,
        loss,
        run.world,
        seed=run.recipe.seed,
        dummy=model.tokenizer.dummy(),
        reduce_per_step=model.reduce_per_step,
        guides={path: guide for path, guide in guides.items() if isinstance(guide, GuideModel)},
        sources=data.names if len(data.names) > 1 else None,
        row_specs=[row_spec_of(loss) for loss in losses] if has_geometry else None,
    )


def chunk_options(run: Run, model: LoadedModel) -> ChunkOptions:
    """How texts are cut into chunks."""
    overhead = run.recipe.train.pass_overhead_tokens
    if overhead is None:
        overhead = pass_overhead(on_gpu=run.world.device.type == "cuda", sharded=model.layout.shard > 1)
    return ChunkOptions(run.recipe.train.chunk_tokens, model.activation_tokens, overhead)


def _query_writers(stores: Sequence[RowStore]) -> dict[str, int]:
    """The language models that wrote queries, with the number of rows of each."""
    counts = collections.Counter[str]()
    for store in stores:
        counts.update(store.query_writers())
    return dict(counts)


def open_tracker(
    run: Run, model: LoadedModel, state: TrainState, stores: Sequence[RowStore], *, has_finished: bool
) -> Tracker:
    """Write the recipe and the model's architecture into the run directory, and open its metrics and trackers."""
    recipe, run_dir = run.recipe, run.run_dir
    with run.world.fail_together("writing the run directory"):
        if run.world.is_main:
            run_dir.stopped.unlink(missing_ok=True)
            if not has_finished or not run_dir.saved_recipe():
                run_dir.write_recipe(to_plain(recipe), run.world.size, model.source.commit, _query_writers(stores))
            # Deleted first: any other file in it would be exported, and read by the libraries that open the export.
            remove_tree(run_dir.architecture)
            write_architecture(run_dir.architecture, model.source, model.tokenizer)
            files = model.source.kind.files
            if recipe.export.check:
                files.require_check(model.source)
            if LOGIT_SCORE in recipe.export.formats:
                files.require_logit_score(model.source, run_dir.architecture)
            write_checksums(run_dir.architecture)
            if model.adapted is not None:
                write_adapter_config(run_dir.adapter, model.adapted, recipe.model, model.source)
                write_checksums(run_dir.adapter)
    with run.world.fail_together("opening the trackers"):
        return Tracker.open(
            recipe,
            run.world,
            run_dir.path,
            resumed_step=state.step or None,
            evaluated=not state.evaluation_due,
            ids=state.tracker_ids,
            console=run.console,
        )


def use_tf32_products(loss: nn.Module, precision: Precision) -> None:
    """Use TF32 for the matrix products of the loss in bf16 runs: 10-bit mantissas, fp32 sums, several times faster.

    Embeddings computed in bf16 have 8 significant bits, so nothing is lost. TF32 is limited to the loss, because rotary
    position embeddings are fp32 products as well, and angles of position 3000 rounded to 11 bits are other positions.

    The forward pass of a loss contains its large products and their gradients. The previous setting is restored after
    each pass. This setting of torch 2.9 and later must not be mixed with the earlier ones: torch and torch.compile
    raise while it is in force.
    """
    if precision is not Precision.bf16:
        return
    previous: list[str] = []

    def enable(*_: object) -> None:
        previous.append(torch.backends.cuda.matmul.fp32_precision)
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def restore(*_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = previous.pop()

    loss.register_forward_pre_hook(enable)
    loss.register_forward_hook(restore, always_call=True)
