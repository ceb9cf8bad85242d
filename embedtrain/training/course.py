"""What decides the course of a run: options and rows that a resumed run must share, and all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedtrain.checkpoint.folder import StepFolder
from embedtrain.config.compose import to_plain
from embedtrain.config.losses import LossConfig
from embedtrain.config.schema import Recipe
from embedtrain.data.batches import TrainData
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, DataError

# Ends the name of an option that is a digest of rows: nobody can set it back.
_ROWS = ".rows"
# Options that may change when a run goes on, and change what is learnt from there.
_STEERING = ("optim.", "train.steps", "train.epochs", "parallel.precision")


def identity_of(
    recipe: Recipe, data: TrainData, losses: Sequence[LossConfig], prompts: Mapping[str, str]
) -> dict[str, Any]:
    """The options that decide what is learnt from which rows in which order: a resumed run must share them.

    Of training files their content counts, not their place.
    """
    model = to_plain(recipe.model)
    rows = {
        name: {
            "rows": f"{len(store)} {store.content}",
            **to_plain(given),
            "loss": None if loss == recipe.loss else to_plain(loss),
        }
        for name, store, given, loss in zip(data.names, data.stores, data.given, losses, strict=True)
    }
    return {
        "seed": recipe.seed,
        "train.global_batch_size": recipe.train.global_batch_size,
        "train.accumulation": recipe.train.accumulation,
        "loss": to_plain(recipe.loss),
        "prompts": {name: prompts.get(name, "") for name in ("query", "document")},
        "data.train": rows,
        "rows of an epoch": data.plan.rows_per_source.tolist(),
        "data.batches": "by_source" if data.plan.by_source else "mixed",
        **{f"model.{key}": value for key, value in model.items() if not key.endswith("_prompt")},
    }


def require_same_course(folder: StepFolder, identity: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a run that learns something else than this one.

    Raises:
        CheckpointError: names the first option that differs, with both values and what to do.
    """
    before = folder.manifest.get("identity", {})
    for option, value in identity.items():
        if option not in before or (difference := _first_difference(option, before[option], value)) is None:
            continue
        name, was, now = difference
        anew = "or choose another output_dir to start anew"
        if name.endswith(_ROWS):
            raise CheckpointError(
                f"{folder.path} was written of other rows than {name.removesuffix(_ROWS)} holds now: bring its "
                f"old files back, {anew}"
            )
        raise CheckpointError(
            f"{folder.path} was written with {name}={was}, this run has {name}={now}: set it back, {anew}"
        )


def changes_since(folder: StepFolder, recipe: Recipe, identity: Mapping[str, Any]) -> list[str]:
    """What the recipe says otherwise than the checkpoint's, where that is allowed, in lines for the user."""
    defaults, before = _flat(to_plain(Recipe())), _flat(folder.manifest.get("recipe", {}))
    changed = [
        (name, before.get(name, defaults.get(name)), value)
        for name, value in _flat(to_plain(recipe)).items()
        if not any(name == option or name.startswith(f"{option}.") for option in (*identity, "model"))
    ]
    told = {name: f"{name} {was} -> {value}" for name, was, value in changed if was != value}
    steering = [text for name, text in told.items() if name.startswith(_STEERING)]
    others = [text for name, text in told.items() if not name.startswith(_STEERING)]
    lines = []
    if steering:
        lines.append(f"changed since step {folder.step}, and with it what is learnt from here: {', '.join(steering)}")
    if others:
        lines.append(f"changed since step {folder.step}, without effect on what is learnt: {', '.join(others)}")
    return lines


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""

    def leaves() -> Iterator[tuple[str, Any]]:
        for name, value in options.items():
            if isinstance(value, Mapping):
                yield from _flat(value, f"{prefix}{name}.").items()
            else:
                yield f"{prefix}{name}", value

    return dict(leaves())


def _first_difference(option: str, before: Any, now: Any) -> tuple[str, Any, Any] | None:
    """The innermost option that differs, and its values: of a long mapping nobody wants to read two copies.

    An option that an earlier version did not know is no difference while it is not set.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        known = {key: value for key, value in now.items() if key in before or value is not None}
        if before.keys() != known.keys():
            return option, ", ".join(map(str, before)), ", ".join(map(str, now))
        differences = (_first_difference(f"{option}.{key}", before[key], value) for key, value in known.items())
        return next((found for found in differences if found is not None), None)
    return None if before == now else (option, before, now)


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
