"""Resuming a run: from which checkpoint it starts, and which options may have changed since then.

A new run may start with the weights and the optimizer state of an earlier one: `train.init_from`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.step_directory import (
    MANIFEST,
    Checkpoint,
    find_checkpoint,
    open_checkpoint,
    verify_checksums,
)
from embedtrain.config.compose import to_plain
from embedtrain.config.kinds import load_kind
from embedtrain.config.losses import (
    LOSSES,
    SIGLIP_BIAS,
    SIGLIP_TEMPERATURE,
    VECTOR_TEMPERATURE,
    VECTOR_TEMPERATURE_BOUNDS,
    InfoNCEConfig,
    LossConfig,
    SigLIPConfig,
)
from embedtrain.config.options import Effect, declarations, effect_of
from embedtrain.config.recipe import CheckpointContents, Recipe, Resume
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.train_data import SourceSettings, TrainData
from embedtrain.errors import CheckpointError
from embedtrain.formats.hub import split_revision
from embedtrain.formats.peft import BASE_WEIGHTS
from embedtrain.tracking.console import Console
from embedtrain.training.inputs import Run, RunInputs, run_length
from embedtrain.training.schedule import schedule_change
from embedtrain.training.state import TrainState
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import format_count
from embedtrain.utils.records import read_record

# Suffix of identity entries that are digests of rows, which the user cannot set.
_ROWS = ".rows"
TEACHERS = "teachers"  # digests of the guides and teachers of the losses, by path
_SOURCES, _ROWS_PER_EPOCH = "data.train", "rows of an epoch"
_BATCHES, _STEPS, _EPOCHS = "data.batches", "train.steps", "train.epochs"
_BATCH_NEGATIVES, _MIXED_SHARE, OPTIMIZER_NAME = "data.batch_negatives", "data.mixed_share", "optim.name"


@dataclass
class RunStart:
    """Where a run starts: from scratch, from a checkpoint, or from the weights of one."""

    checkpoint: Checkpoint | None
    has_finished: bool = False  # whether the recipe has no step left to train, valid after `check`

    @property
    def from_scratch(self) -> bool:
        """Whether weights and vocabulary come from the recipe instead of a checkpoint."""
        return self.checkpoint is None

    def check(self, identity: Mapping[str, Any], recipe: Recipe, total_steps: int, console: Console) -> None:
        """Reject a checkpoint of another run, and print which other options have changed since it was written.

        A run that has finished is another one if an option that changes training is: its model would be returned for
        options with which it was not trained.
        """
        if recipe.resume is Resume.require:
            self._require_progress(recipe, total_steps)
        if self.checkpoint is None:
            return
        self.has_finished = _has_finished(self.checkpoint, recipe, total_steps)
        changed = find_changes(self.checkpoint, recipe)[Effect.changes_training]
        untrained = changed if self.has_finished else []
        if self.checkpoint.step == total_steps:  # as many steps by `steps` as by `epochs`, or the run ends early
            untrained = [change for change in untrained if change.option not in (_STEPS, _EPOCHS)]
        require_same_run(self.checkpoint, identity, untrained)
        for effect, line in describe_changes(self.checkpoint, recipe).items():
            (console.warn if effect is Effect.changes_training else console.note)(line)

    def _require_progress(self, recipe: Recipe, total_steps: int) -> None:
        """Raise CheckpointError if there is nothing to continue."""
        option = f"resume=require: output_dir={recipe.output_dir} holds"
        if self.checkpoint is None:
            raise CheckpointError(f"{option} no intact checkpoint: correct output_dir, or write resume=auto")
        if self.checkpoint.step < total_steps and self.checkpoint.manifest.contents is CheckpointContents.model:
            raise CheckpointError(
                f"{option} {self.checkpoint.path} without optimizer state (checkpoint.contents=model), from which only "
                "a new run can start: write resume=auto for one"
            )


def _has_finished(checkpoint: Checkpoint, recipe: Recipe, total_steps: int) -> bool:
    """Whether no step is left: all are done, or `evaluation.patience` is exhausted."""
    if checkpoint.step >= total_steps:
        return True
    state, patience = read_state(checkpoint), recipe.evaluation.patience
    is_complete = checkpoint.manifest.contents is CheckpointContents.all
    same_metric = state.best_by == recipe.checkpoint.best_metric
    return is_complete and same_metric and patience is not None and state.not_better >= patience


def read_state(checkpoint: Checkpoint) -> TrainState:
    """The progress of the run that wrote a checkpoint; CheckpointError if the manifest does not hold it."""
    try:
        saved = dict(checkpoint.manifest.state)
        if "wandb_id" in saved:  # as earlier versions wrote it
            id = saved.pop("wandb_id")
            saved["tracker_ids"] = {} if id is None else {"wandb": id}
        return read_record(TrainState, saved)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path / MANIFEST} is damaged: state: {error}") from None


@dataclass(frozen=True, slots=True)
class Change:
    """An option, by its innermost name, with two values."""

    option: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.option} {_format_value(self.saved)} -> {_format_value(self.now)}"


# Options of losses whose default is the model's, and was the cosine in earlier versions.
_COMPARES = {"similarity", "distance"}
# Options whose defaults depend on the model, and those of a model with one vector of a text, by `loss.name`.
_DEFAULTS: dict[str, dict[str, Any]] = {
    InfoNCEConfig.name: {
        "temperature": VECTOR_TEMPERATURE,
        "temperature_bounds": list(VECTOR_TEMPERATURE_BOUNDS),
    },
    SigLIPConfig.name: {
        "temperature": SIGLIP_TEMPERATURE,
        "bias": SIGLIP_BIAS,
        "temperature_bounds": list(VECTOR_TEMPERATURE_BOUNDS),
    },
}


def run_identity(
    recipe: Recipe, data: TrainData, losses: Sequence[LossConfig], prompts: Mapping[str, str]
) -> dict[str, Any]:
    """What determines which rows are trained on, in which order and how: a resumed run must have the same.

    Training files are identified by content, not by path.
    """
    kind = recipe.model.kind
    common_loss = _loss_identity(recipe.loss, kind)
    rows = {
        name: {
            "rows": f"{len(store)} {store.content}",
            **_source_identity(store, settings),
            "loss": None if (own := _loss_identity(loss, kind)) == common_loss else own,
        }
        for name, store, settings, loss in zip(data.names, data.stores, data.settings, losses, strict=True)
    }
    return {
        "seed": recipe.seed,
        OPTIMIZER_NAME: recipe.optim.name.value,
        "train.global_batch_size": recipe.train.global_batch_size,
        "train.gradient_accumulation_steps": recipe.train.gradient_accumulation_steps,
        "loss": common_loss,
        _BATCH_NEGATIVES: recipe.data.batch_negatives,
        "prompts": {name: prompts.get(name, "") for name in ("query", "document")},
        _SOURCES: rows,
        _ROWS_PER_EPOCH: data.plan.rows_per_source.tolist(),
        _BATCHES: "by_source" if data.plan.by_source else "mixed",
        _MIXED_SHARE: recipe.data.mixed_share,
        **_model_identity(to_plain(recipe.model)),
    }


def _model_identity(options: Mapping[str, Any]) -> dict[str, Any]:
    # Prompts are compared as resolved from the model's directory and the recipe.
    excluded = ("query_prompt", "document_prompt", "attention")
    return {f"model.{key}": value for key, value in options.items() if key not in excluded}


def _source_identity(store: RowStore, settings: SourceSettings) -> dict[str, Any]:
    """Options of all rows of a source; the instruction format only matters if rows have instructions."""
    options: dict[str, Any] = {**to_plain(settings.text_format), "negatives": settings.negatives}
    options["batch_negatives"] = settings.batch_negatives
    if not {"instruction", "document_instruction"} & store.extra_columns:
        options["instruction_format"] = None
    return options


def _loss_identity(loss: LossConfig, kind: str) -> dict[str, Any]:
    """Options of a loss that affect its values."""
    options: dict[str, Any] = to_plain(loss)
    for part in (options, *options.get("losses", ())):
        part.pop("implementation", None)
        for name in _COMPARES & part.keys():
            part[name] = part[name] or "cosine"
        # Earlier versions wrote these numbers, which were the defaults. A kind without one takes that of its files.
        if load_kind(kind).has_one_vector and load_kind(kind).temperature is not None:
            for name, value in _DEFAULTS.get(part["name"], {}).items():
                part[name] = value if part[name] is None else part[name]
    return options


def require_same_run(checkpoint: Checkpoint, identity: Mapping[str, Any], changes: Sequence[Change] = ()) -> None:
    """Reject a checkpoint of a run with another identity, or with `changes` of other options. Names all of them."""
    defaults = {_BATCH_NEGATIVES: 0, OPTIMIZER_NAME: "adamw", _MIXED_SHARE: 0.0}
    defaults |= _model_identity(to_plain(load_kind(identity["model.kind"]).model_options()))
    before: dict[str, Any] = defaults | checkpoint.manifest.identity
    if TEACHERS in identity:  # earlier versions had digests of stored vectors only, or no commits of Hub ids
        before |= {TEACHERS: {**identity[TEACHERS], **before.get(TEACHERS, before.get("teacher_vectors", {}))}}
    before, identity = _unpinned(before), _unpinned(identity)
    differences = _identity_changes(before, identity)
    options = [*(change for change in differences if _explain_content(change, identity) is None), *changes]
    content = [text for change in differences if (text := _explain_content(change, identity)) is not None]
    if not options and not content:
        return
    texts, remedies = [], []
    if options:
        saved = ", ".join(f"{change.option}={_format_value(change.saved)}" for change in options)
        now = ", ".join(f"{change.option}={_format_value(change.now)}" for change in options)
        texts.append(f"{saved}, this run has {now}")
        remedies.append("set it back" if len(options) == 1 else "set them back")
    texts += [text for text, _ in content]
    remedies += [remedy for _, remedy in content]
    raise CheckpointError(
        f"{checkpoint.path} was written with {', and with '.join(texts)}: {', '.join(dict.fromkeys(remedies))}, or "
        "choose another output_dir to start from scratch"
    )


def _identity_changes(before: Mapping[str, Any], identity: Mapping[str, Any]) -> list[Change]:
    """The differences of two identities, without those that follow from another one."""
    changes: list[Change] = []
    for option, value in identity.items():
        found = list(_differences(option, before.get(option, value), value))
        # Another loss has other options.
        changes += [change for change in found if change.option.endswith(".name")][:1] or found
    named: list[tuple[Any, Any]] = []
    kept = []
    for change in sorted(changes, key=lambda change: change.option.startswith(_SOURCES)):
        # An option of the recipe is one of each source as well; other rows have another number, and a loss of a source
        # makes batches by source.
        is_of_source = change.option.startswith(f"{_SOURCES}.")
        if is_of_source and (change.saved, change.now) in named:
            continue
        if change.option in (_ROWS_PER_EPOCH, _BATCHES) and any(c.option.startswith(_SOURCES) for c in changes):
            continue
        named.append((change.saved, change.now))
        kept.append(change)
    return kept


def _base_models(identity: Mapping[str, Any]) -> str:
    """The option that names the model's directory, or those of both towers."""
    names = ("model.path", "model.query.path", "model.document.path")
    return " and ".join(f"{name}={identity[name]}" for name in names if identity.get(name) is not None)


def _explain_content(change: Change, identity: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is different in files, and how to set it back; None for a change of an option."""
    name = change.option
    if name == BASE_WEIGHTS:
        return f"other weights than those of {_base_models(identity)}", "restore its old files"
    if name.startswith(f"{TEACHERS}."):
        teacher = name.removeprefix(f"{TEACHERS}.")
        exists = expand_user(teacher).exists()
        return (
            f"other content of the loss's guide or teacher {teacher} (digest {change.saved}, this run has "
            f"{change.now})",
            "restore its old files" if exists else f"write {teacher}@{change.saved}",
        )
    if name.endswith(_ROWS):
        return f"other rows than those of {name.removesuffix(_ROWS)}", "restore its old files"
    if name == _ROWS_PER_EPOCH:
        return (
            f"{change.saved} rows of the sources per epoch, this run has {change.now}",
            "set weight and max_rows in data.train, data.weight_mode and data.mixing_temperature back",
        )
    return None


def _unpinned(value: Any, name: str = "") -> Any:
    """An identity without the revisions of guides and teachers, whose commits are in it."""
    match value:
        case Mapping():
            return {key: _unpinned(item, key) for key, item in value.items()}
        case list():
            return [_unpinned(item, name) for item in value]
        case str() if name in ("guide", "teacher", "teachers"):
            return split_revision(value)[0]
    return value


def measures_otherwise(saved: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether an evaluation of the same weights measures something else than with the saved recipe."""
    now = to_plain(recipe)
    changes = (change for group in now for change in _differences(group, saved.get(group, {}), now[group]))
    return any(declared.is_measured for change in changes for declared in declarations(recipe, change.option))


def find_changes(checkpoint: Checkpoint, recipe: Recipe) -> dict[Effect, list[Change]]:
    """Options of the recipe that differ from the checkpoint's, by their effect."""
    before, now = checkpoint.manifest.recipe, to_plain(recipe)
    defaults = to_plain(Recipe())
    changes: dict[Effect, list[Change]] = {effect: [] for effect in Effect}
    for group, options in now.items():
        for change in _differences(group, _with_defaults(before.get(group), defaults[group]), options):
            changes[effect_of(change.option, recipe)].append(change)
    return changes


def describe_changes(checkpoint: Checkpoint, recipe: Recipe) -> dict[Effect, str]:
    """One line for each effect, except for what the run's identity has."""
    changes = find_changes(checkpoint, recipe)
    return {
        effect: f"{effect.value.format(step=checkpoint.step)}: {', '.join(map(str, changes[effect]))}"
        for effect in (Effect.changes_training, Effect.changes_rounding, Effect.no_effect)
        if changes[effect]
    }


def _with_defaults(options: Any, defaults: Any) -> Any:
    """Options written by an earlier version, completed by the defaults of options that it did not have."""
    if not isinstance(defaults, Mapping):
        return defaults if options is None else options
    return dict(defaults) | {
        name: _with_defaults(value, defaults[name]) if isinstance(defaults.get(name), Mapping) else value
        for name, value in (options if isinstance(options, Mapping) else {}).items()
    }


def _format_value(value: Any) -> Any:
    """A value in a message: lists show the paths of their elements, texts have quotes if their end is unclear."""
    if isinstance(value, list):
        return [item.get("path", item) if isinstance(item, Mapping) else item for item in value]
    return repr(value) if isinstance(value, str) and value.split() != [value] else value


def _differences(option: str, before: Any, now: Any) -> Iterator[Change]:
    """The innermost options that differ, with both values.

    An option that the earlier version did not have counts as its default. Options that no longer exist are ignored.
    """
    match before, now:
        case Mapping(), Mapping() if option == _SOURCES and before.keys() != now.keys():
            yield Change(option, list(before), list(now))
        case Mapping(), Mapping():
            defaults = _defaults_of(option, now)
            for key, value in now.items():
                yield from _differences(f"{option}.{key}", before.get(key, defaults.get(key)), value)
        case list(), list() if len(before) == len(now) and all(isinstance(item, Mapping) for item in (*before, *now)):
            for index, (saved, value) in enumerate(zip(before, now, strict=True)):
                yield from _differences(f"{option}[{index}]", saved, value)
        case _ if before != now:
            yield Change(option, before, now)


def _defaults_of(option: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the options of a loss or a source."""
    kind = LOSSES.get(str(options.get("name")))
    if kind is not None:
        return dict(to_plain(kind()))
    of_source = {"query_prompt": "", "document_prompt": "", "batch_negatives": 0}
    return of_source if option.startswith(f"{_SOURCES}.") else {}


def restore(
    run: Run,
    inputs: RunInputs,
    start: RunStart,
    checkpointer: Checkpointer,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> TrainState:
    """Read what training starts from: a checkpoint of the run, or the one that `train.init_from` names. A collective.

    The step of the returned progress is 0 for a new run, also from the weights of a checkpoint. Prints how the learning
    rate of a resumed run continues, if the recipe's schedule has changed.
    """
    state, recipe, saved = TrainState(), run.recipe, start.checkpoint
    if saved is not None:
        state = _read(run, inputs.length.steps, saved, checkpointer, module, optimizer)
    elif recipe.train.init_from is not None:
        _start_from(run, recipe.train.init_from, checkpointer, module, optimizer)
    if state.best_by != recipe.checkpoint.best_metric:  # the best value of another metric cannot be compared
        state.best_by, state.best, state.best_step, state.not_better = recipe.checkpoint.best_metric, None, None, 0
    if saved is not None and state.step:
        before = saved.manifest.recipe
        change = schedule_change(before, recipe, state.step, lambda other: run_length(other, inputs.data).steps)
        if change is not None:
            run.console.warn(change)
    return state


def _read(
    run: Run,
    total_steps: int,
    checkpoint: Checkpoint,
    checkpointer: Checkpointer,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> TrainState:
    """Read weights, optimizer and progress from a checkpoint of the run. A collective."""
    saved = checkpointer.resume(checkpoint, module, optimizer)
    if checkpoint.step >= total_steps:
        length = _STEPS if run.recipe.train.epochs is None else _EPOCHS
        run.console.note(
            f"{checkpoint.path} is the end of this run: increase {length} to continue, or set another output_dir to "
            "start from scratch"
        )
        return read_state(checkpoint)
    if saved is None:
        run.console.note(f"{checkpoint.path} contains only weights: starting a new run from them at step 0")
        return TrainState()
    ranks = format_count(checkpoint.manifest.world_size, "rank")
    run.console.note(f"resuming from {checkpoint.path}, written by {ranks}")
    return read_state(checkpoint)


def _start_from(
    run: Run, path: str, checkpointer: Checkpointer, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Read weights and optimizer from a checkpoint of another run, by names of parameters. A collective.

    Raises CheckpointError if it has no optimizer state, another optimizer, other frozen weights, or other parameters.
    """
    world, option = run.world, f"train.init_from={path}"
    location = ""
    with world.fail_together("opening train.init_from"):
        if world.is_main:
            location = str(_initial_checkpoint(path).path)
    location = world.broadcast(location)
    with world.fail_together("verifying train.init_from"):
        checkpoint = open_checkpoint(Path(location))
        verify_checksums(checkpoint, world.rank, world.size)
        manifest = checkpoint.manifest
        if manifest.contents is not CheckpointContents.all:
            raise CheckpointError(f"{option}: {checkpoint.path} has no optimizer state (checkpoint.contents=model)")
        before, name = str(manifest.identity.get(OPTIMIZER_NAME, "adamw")), run.recipe.optim.name.value
        if before != name:
            raise CheckpointError(f"{option} was trained with optim.name={before}, this run has optim.name={name}")
        if manifest.identity.get(BASE_WEIGHTS) != checkpointer.identity.get(BASE_WEIGHTS):
            raise CheckpointError(
                f"{option} trained adapters (model.lora) on other weights than those of "
                f"{_base_models(checkpointer.identity)}: start from the same base model"
            )
    try:
        checkpointer.resume(checkpoint, module, optimizer)
    except CheckpointError as error:
        raise CheckpointError(f"{option}: the model or its loss is another one: {error}") from None
    run.console.note(f"starting from the weights and the optimizer state of {checkpoint.path}")


def _initial_checkpoint(path: str) -> Checkpoint:
    """A checkpoint, or of a run that of the step that it has exported."""
    directory = expand_user(path)
    if (directory / MANIFEST).is_file():
        return open_checkpoint(directory)
    newest = find_checkpoint(directory / "checkpoints", "latest")
    best = read_state(newest).best_step if newest.manifest.recipe["checkpoint"]["best_metric"] is not None else None
    return newest if best is None else find_checkpoint(directory / "checkpoints", str(best))
