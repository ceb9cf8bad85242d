"""What decides the course of a run: options and rows that a resumed run must share, and all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from embedtrain.checkpoint.export.adapters import BASE_WEIGHTS
from embedtrain.checkpoint.step_directory import Checkpoint
from embedtrain.config.compose import to_plain
from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import ModelConfig, Recipe
from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.drawn import Given
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, DataError

# Ends the name of an option that is a digest of rows: nobody can set it back.
_ROWS = ".rows"
_OF_SOURCES, _OF_AN_EPOCH = "data.train", "rows of an epoch"


class Effect(Enum):
    """What it does to a run that goes on when an option is changed; the value is how it is said."""

    must_match = "is refused, where it changes what is learnt from which rows"
    changes_training = "changed since step {step}, and with it what is learnt from here or which step is exported"
    changes_rounding = "changed since step {step}: the same is learnt, with other rounding and other dropout masks"
    no_effect = "changed since step {step}, without effect on what is learnt"


# By the beginning of an option's name; the longest that fits decides.
EFFECTS = {
    "name": Effect.no_effect,
    "seed": Effect.must_match,
    "output_dir": Effect.no_effect,
    "model": Effect.must_match,
    "model.attention": Effect.changes_rounding,
    "data.train": Effect.must_match,
    "data.batches": Effect.must_match,
    # Of these, rows and their numbers in an epoch tell whether they change anything: identity_of has them.
    "data.on_error": Effect.no_effect,
    "data.weight_mode": Effect.no_effect,
    "data.mixing_temperature": Effect.no_effect,
    "data.instruction_format": Effect.no_effect,
    "data.cache_dir": Effect.no_effect,
    "data.workers": Effect.no_effect,
    "loss": Effect.must_match,
    "loss.implementation": Effect.changes_rounding,
    "optim": Effect.changes_training,
    "train.steps": Effect.changes_training,
    "train.epochs": Effect.changes_training,
    "train.global_batch_size": Effect.must_match,
    "train.gradient_accumulation_steps": Effect.must_match,
    "train.chunk_tokens": Effect.changes_rounding,
    "train.activation_tokens": Effect.changes_rounding,
    "train.pass_overhead_tokens": Effect.changes_rounding,
    "train.log_every": Effect.no_effect,
    "parallel": Effect.changes_rounding,
    "parallel.precision": Effect.changes_training,
    "parallel.timeout": Effect.no_effect,
    "parallel.step_timeout": Effect.no_effect,
    "evaluation": Effect.no_effect,
    "evaluation.patience": Effect.changes_training,
    "checkpoint": Effect.no_effect,
    "checkpoint.best_metric": Effect.changes_training,
    "export": Effect.no_effect,
    "tracking": Effect.no_effect,
}
# What the best step is chosen by, where one is asked for.
_CHOOSES_BEST = ("evaluation.every", "evaluation.sets", "evaluation.subset", "evaluation.index")


def effect_of(option: str, recipe: Recipe) -> Effect:
    """What a change of an option does to a run that goes on by this recipe."""
    if recipe.checkpoint.best_metric is not None and option.startswith(_CHOOSES_BEST):
        return Effect.changes_training
    begins = (name for name in EFFECTS if option == name or option.startswith((f"{name}.", f"{name}[")))
    return EFFECTS[max(begins, key=len)]


def run_identity(
    recipe: Recipe, data: TrainData, losses: Sequence[LossConfig], prompts: Mapping[str, str]
) -> dict[str, Any]:
    """The options that decide what is learnt from which rows in which order: a resumed run must share them.

    Of training files their content counts, not their place.
    """
    of_all = _learnt(recipe.loss)
    rows = {
        name: {
            "rows": f"{len(store)} {store.content}",
            **_given(store, given),
            "loss": None if (own := _learnt(loss)) == of_all else own,
        }
        for name, store, given, loss in zip(data.names, data.stores, data.given, losses, strict=True)
    }
    return {
        "seed": recipe.seed,
        "train.global_batch_size": recipe.train.global_batch_size,
        "train.gradient_accumulation_steps": recipe.train.gradient_accumulation_steps,
        "loss": of_all,
        "prompts": {name: prompts.get(name, "") for name in ("query", "document")},
        _OF_SOURCES: rows,
        _OF_AN_EPOCH: data.plan.rows_per_source.tolist(),
        "data.batches": "by_source" if data.plan.by_source else "mixed",
        **_of_model(to_plain(recipe.model)),
    }


def _of_model(options: Mapping[str, Any]) -> dict[str, Any]:
    # Prompts count as they were found, in the model's directory or here.
    apart = ("query_prompt", "document_prompt", "attention")
    return {f"model.{key}": value for key, value in options.items() if key not in apart}


def _given(store: RowStore, given: Given) -> dict[str, Any]:
    """What holds for all rows of a source; how instructions stand around texts where rows carry any."""
    options: dict[str, Any] = to_plain(given)
    if not {"instruction", "document_instruction"} & store.beside:
        options["instruction_format"] = None
    return options


def _learnt(loss: LossConfig) -> dict[str, Any]:
    """Options of a loss that decide its figures."""
    options: dict[str, Any] = to_plain(loss)
    for part in (options, *options.get("losses", ())):
        part.pop("implementation", None)
    return options


def require_same_run(folder: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a run that learns something else than this one.

    Raises:
        CheckpointError: names the first option that differs, with both values and what to do.
    """
    before = _of_model(to_plain(ModelConfig())) | dict(folder.manifest.get("identity", {}))
    for option, value in identity.items():
        difference = next(_differences(option, before.get(option, value), value), None)
        if difference is None:
            continue
        name, was, now = difference
        anew = "or choose another output_dir to start anew"
        if name == BASE_WEIGHTS:
            raise CheckpointError(
                f"{folder.path} was written on other weights than model.path={identity.get('model.path')} has now: "
                f"bring its old files back, {anew}"
            )
        if name.endswith(_ROWS):
            raise CheckpointError(
                f"{folder.path} was written of other rows than {name.removesuffix(_ROWS)} holds now: bring its "
                f"old files back, {anew}"
            )
        if name == _OF_AN_EPOCH:
            raise CheckpointError(
                f"{folder.path} was written with {was} rows of the sources in an epoch, this run has {now}: set weight "
                f"and max_rows in data.train, data.weight_mode and data.mixing_temperature back, {anew}"
            )
        raise CheckpointError(
            f"{folder.path} was written with {name}={_told(was)}, this run has {name}={_told(now)}: set it back, {anew}"
        )


def describe_changes(folder: Checkpoint, recipe: Recipe) -> dict[Effect, str]:
    """What a recipe of the same course says otherwise than the checkpoint's, in a line for each effect it has."""
    before, now = folder.manifest.get("recipe", {}), to_plain(recipe)
    defaults = to_plain(Recipe())
    told: dict[Effect, list[str]] = {effect: [] for effect in Effect}
    for group, options in now.items():
        for name, was, value in _differences(group, _filled(before.get(group), defaults[group]), options):
            told[effect_of(name, recipe)].append(f"{name} {_told(was)} -> {_told(value)}")
    return {
        effect: f"{effect.value.format(step=folder.step)}: {', '.join(told[effect])}"
        for effect in (Effect.changes_training, Effect.changes_rounding, Effect.no_effect)
        if told[effect]
    }


def _filled(options: Any, defaults: Any) -> Any:
    """Options as a version wrote them that did not know all of today's: of the others the defaults."""
    if not isinstance(defaults, Mapping):
        return defaults if options is None else options
    return dict(defaults) | {
        name: _filled(value, defaults[name]) if isinstance(defaults.get(name), Mapping) else value
        for name, value in (options or {}).items()
    }


def _told(value: Any) -> Any:
    """A value in a line: of a list's elements their paths, and quotes where one would not see where a text ends."""
    if isinstance(value, list):
        return [one.get("path", one) if isinstance(one, Mapping) else one for one in value]
    return repr(value) if isinstance(value, str) and value.split() != [value] else value


def _differences(option: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """The innermost options that differ, and their values: of a long mapping nobody wants to read two copies.

    An option that the version before did not know had its default's value, and one that this version does not know has
    no effect any more.
    """
    match before, now:
        case Mapping(), Mapping() if option == _OF_SOURCES and before.keys() != now.keys():
            yield option, list(before), list(now)
        case Mapping(), Mapping():
            unknown = _defaults_of(option, now)
            for key, value in now.items():
                yield from _differences(f"{option}.{key}", before.get(key, unknown.get(key)), value)
        case list(), list() if len(before) == len(now) and all(isinstance(one, Mapping) for one in (*before, *now)):
            for number, (was, value) in enumerate(zip(before, now, strict=True)):
                yield from _differences(f"{option}[{number}]", was, value)
        case _ if before != now:
            yield option, before, now


def _defaults_of(option: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the options of a source or of a loss are where nothing is said."""
    kind = LOSSES.get(str(options.get("name")))
    if kind is not None:
        return dict(to_plain(kind()))
    given = fields(Given) if option.startswith(f"{_OF_SOURCES}.") else ()
    return {field.name: field.default for field in given if field.default is not MISSING}


def require_same_data(data: TrainData, world: World) -> None:
    """Refuse files that are not the same on all nodes: ranks would take other rows for one batch.

    Raises:
        DataError: on every rank alike.
    """
    found = world.gather([(store.report.name, store.content) for store in data.stores])
    for rank, other in enumerate(found):
        mine, its = [name for name, _ in found[0]], [name for name, _ in other]
        if mine != its:
            name = next(iter(set(mine) ^ set(its)), "their order")
            raise DataError(
                f"data.train: rank {rank} finds other files than rank 0 ({name}): they must be the same on all nodes"
            )
        for (name, first), (_, content) in zip(found[0], other, strict=True):
            if first != content:
                raise DataError(
                    f"data.train: {name} holds other rows on rank {rank} than on rank 0: its files must be the same on "
                    "all nodes"
                )


def require_same_tokenizer(tokenizer: TextTokenizer, world: World) -> None:
    """Refuse tokenizers that are not the same on all nodes: ranks would find other lengths, and other texts theirs.

    Raises:
        DataError: on every rank alike.
    """
    found = world.gather(tokenizer.fingerprint)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise DataError(
                f"rank {rank} has another tokenizer than rank 0: the model's files must be the same on all nodes"
            )
